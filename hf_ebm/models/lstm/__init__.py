"""Recurrent models inside the Transformers stack.

- `LSTMSeq2SeqForConditionalGeneration`: an encoder-decoder;
- `BiLSTMForMaskedLM`: a masked language model of two LSTMs.
"""

from hf_ebm.models.lstm.configuration_lstm import BiLSTMMaskedLMConfig, LSTMSeq2SeqConfig
from hf_ebm.models.lstm.modeling_bilstm import BiLSTMForMaskedLM, BiLSTMModel
from hf_ebm.models.lstm.modeling_lstm_seq2seq import LSTMSeq2SeqForConditionalGeneration
from hf_ebm.models.lstm.modules_lstm import LSTMCache
from hf_ebm.renamed import rename_modules

rename_modules(__name__, {"factored_partition": f"{__name__}.modeling_bilstm"})

__all__ = [
    "BiLSTMForMaskedLM",
    "BiLSTMMaskedLMConfig",
    "BiLSTMModel",
    "LSTMCache",
    "LSTMSeq2SeqConfig",
    "LSTMSeq2SeqForConditionalGeneration",
]
