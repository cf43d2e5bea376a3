"""`LSTMSeq2SeqForConditionalGeneration`: a recurrent encoder-decoder inside the Transformers stack."""

from hf_ebm.models.lstm.cache_lstm import LSTMCache
from hf_ebm.models.lstm.configuration_lstm_seq2seq import LSTMSeq2SeqConfig
from hf_ebm.models.lstm.modeling_lstm_seq2seq import LSTMSeq2SeqForConditionalGeneration

__all__ = ["LSTMCache", "LSTMSeq2SeqConfig", "LSTMSeq2SeqForConditionalGeneration"]
