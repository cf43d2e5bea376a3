"""Recurrent models inside the Transformers stack.

- `LSTMSeq2SeqForConditionalGeneration`: an encoder-decoder;
- `BiLSTMForMaskedLM`: a masked language model of two LSTMs.
"""

from hf_ebm.models.lstm.configuration_lstm import BiLSTMMaskedLMConfig, LSTMSeq2SeqConfig
from hf_ebm.models.lstm.modeling_bilstm import BiLSTMForMaskedLM, BiLSTMModel
from hf_ebm.models.lstm.modeling_lstm_seq2seq import LSTMSeq2SeqForConditionalGeneration
from hf_ebm.models.lstm.modules_lstm import LSTMCache

__all__ = [
    "BiLSTMForMaskedLM",
    "BiLSTMMaskedLMConfig",
    "BiLSTMModel",
    "LSTMCache",
    "LSTMSeq2SeqConfig",
    "LSTMSeq2SeqForConditionalGeneration",
]
