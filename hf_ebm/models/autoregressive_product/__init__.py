"""`ProductLM`: a frozen language model times another, renormalized at every token: the baseline of residual models."""

from hf_ebm.models.autoregressive_product.modeling_product import ProductLM, ProductLMConfig

__all__ = ["ProductLM", "ProductLMConfig"]
