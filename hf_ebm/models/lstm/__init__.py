"""Recurrent models inside the Transformers stack.

- `modeling_lstm_seq2seq`, `modules_lstm`: `LSTMSeq2SeqForConditionalGeneration`, an encoder-decoder, and its parts;
- `modeling_bilstm`: `BiLSTMForMaskedLM`, a masked language model of two LSTMs.
"""

from hf_ebm.models.lstm.modeling_bilstm import BiLSTMForMaskedLM, BiLSTMMaskedLMConfig, BiLSTMModel
from hf_ebm.models.lstm.modeling_lstm_seq2seq import LSTMSeq2SeqForConditionalGeneration
from hf_ebm.models.lstm.modules_lstm import LSTMCache, LSTMSeq2SeqConfig
from hf_ebm.renamed import rename_modules

_CONFIGS = (f"{__name__}.modeling_bilstm", f"{__name__}.modules_lstm")
rename_modules(__name__, {"configuration_lstm": _CONFIGS, "factored_partition": f"{__name__}.modeling_bilstm"})

__all__ = [
    "BiLSTMForMaskedLM",
    "BiLSTMMaskedLMConfig",
    "BiLSTMModel",
    "LSTMCache",
    "LSTMSeq2SeqConfig",
    "LSTMSeq2SeqForConditionalGeneration",
]
