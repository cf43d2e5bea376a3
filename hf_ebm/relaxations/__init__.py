"""Continuous relaxations of search: soft argmax, soft samples, soft top-k, soft beam search, stepwise decoding.

`soft_argmax`, `soft_top_k` and `soft_beam` are pure functions on tensors. `stepwise` runs any sequence-to-sequence
model of Transformers one step at a time on embeddings, with gradients through its cache; `decoder_state` holds what is
carried from step to step. `soft_beam_search` is soft beam decoding behind `generate()`.
"""
