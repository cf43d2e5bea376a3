"""Continuous relaxations of search: soft argmax, soft samples, soft top-k, soft beam search, stepwise decoding.

`soft_choices` and `soft_beam` are functions on tensors; the latter holds soft beam decoding behind `generate()`, too.
`stepwise` runs any sequence-to-sequence model of Transformers one step at a time on embeddings, with gradients through
its cache, and sums those of weights that are read at every step.
"""

from hf_ebm.renamed import rename_modules

rename_modules(
    __name__,
    {
        "decoder_state": f"{__name__}.stepwise",
        "weight_gradients": f"{__name__}.stepwise",
        "soft_beam_search": f"{__name__}.soft_beam",
        "soft_argmax": f"{__name__}.soft_choices",
        "soft_top_k": f"{__name__}.soft_choices",
    },
)
