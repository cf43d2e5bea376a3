"""`ExpertEnergy`: another model's energy as a term of the target, which makes a product of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import check_tokenizer

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel


class ExpertEnergy:
    """Adaptor: the energy of a further model as an extra energy, for a product of experts `exp(-(E + Σ w_k E_k))`.

    Args:
        model: the further model, an expert.
        own_tokenizer, tokenizer: its tokenizer and that of the model that samples, where their vocabularies differ.
            They meet in the text, special tokens left out; one that the expert's tokenizer has no tokens for has
            infinite energy. Without them both models read the same ids.
        token_budget: tokens per forward pass of the expert; by default from free memory.

    Raises:
        ValueError: for one tokenizer of the two, and when called for what `EnergyModel.score` refuses.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> ids = tokenizer(["let there be light"], return_tensors="pt").input_ids
        >>> same, through_text = ExpertEnergy(model), ExpertEnergy(model, tokenizer, tokenizer)
        >>> torch.allclose(same(ids), model(ids).energy.double()), torch.allclose(same(ids), through_text(ids))
        (True, True)
        >>> start = tokenizer("and the king said unto him", return_tensors="pt")
        >>> out = model.generate(**start, max_changes=2, extra_energies=[(0.5, same)], num_epochs=2, seed=0)
    """

    def __init__(
        self,
        model: EnergyModel,
        own_tokenizer: PreTrainedTokenizerBase | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        token_budget: int | None = None,
    ):
        if (own_tokenizer is None) != (tokenizer is None):
            raise ValueError("own_tokenizer and tokenizer go together: give both, or none where ids are the same")
        for name, given in (("own_tokenizer", own_tokenizer), ("tokenizer", tokenizer)):
            if given is not None:
                check_tokenizer(name, given)
        self.model, self.own_tokenizer, self.tokenizer, self.token_budget = (
            model,
            own_tokenizer,
            tokenizer,
            token_budget,
        )

    def __call__(self, ids: Tensor) -> Tensor:
        """(n,) energies in nats, float64, of token ids (n, T) of the model that samples."""
        if self.own_tokenizer is None or self.tokenizer is None:
            pad = self.model.config.pad_token_id
            attended = None if pad is None else (ids != pad).long()
            return self.model.score_ids(ids, attended, token_budget=self.token_budget).double().sum(1)
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        found = self.model.score(texts, self.own_tokenizer, token_budget=self.token_budget, unknown_tokens="ignore")
        return found.energy.masked_fill(found.num_unknown > 0, torch.inf)
