"""`"joint-fill-mask"`: fills of all masks of a text together, by `EnergyModel.fill`."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.fill_energy import Fill
from hf_ebm.pipelines.base import RowPipeline


class JointFillMaskPipeline(RowPipeline):
    """Texts with masks to their likeliest fills, by `EnergyModel.fill`.

    An input is a text with mask tokens.

    A result is a list of fills, best first, each a dict as of `"fill-mask"`: `score`, the fill's probability; `token`
    and `token_str`; `sequence`; and `energy` in nats. Of a text with one mask `token` is an id and `token_str` a text,
    of several they are lists of so many; of a blank of several pieces `token` is a list of ids. With `marginals=True`
    the result is, as that of `"fill-mask"` for several masks, a list for each blank, of dicts with `score`, `token` and
    `token_str`.

    Arguments of a call: `marginals`, and those of `EnergyModel.fill` for all texts alike.
    """

    model_classes: ClassVar = (EnergyModel,)
    model: EnergyModel

    def arguments(self) -> tuple[str, ...]:
        return (
            "marginals", "top_k", "reading", "method", "temperature", "words", "pieces", "equal", "different",
            "pattern", "extra_energies", "row_limit", "seed", "token_budget", "further_inputs",
        )  # fmt: skip

    def prepared(self, item: object) -> str:
        if not isinstance(item, str):
            raise ValueError(f"inputs must be texts, got {type(item).__name__}")
        return item

    def run_batch(self, rows: list[str], numbers: list[int], **arguments: Any) -> list[list]:
        by_blank = arguments.pop("marginals", False)
        found = self.model.fill(rows, self.spelling, unknown_tokens="ignore", **arguments)
        if by_blank:
            return [
                [
                    [{"score": w.probability, "token": _token(w.tokens), "token_str": w.token_str} for w in words]
                    for words in blanks
                ]
                for blanks in found.marginals
            ]
        return [[_as_dict(one) for one in fills] for fills in found.fills]


def _as_dict(one: Fill) -> dict[str, Any]:
    token, text = [_token(word) for word in one.tokens], one.token_strs
    alone = len(token) == 1
    return {
        "score": one.probability,
        "token": token[0] if alone else token,
        "token_str": text[0] if alone else text,
        "sequence": one.sequence,
        "energy": one.energy,
    }


def _token(pieces: list[int]) -> int | list[int]:
    return pieces[0] if len(pieces) == 1 else pieces
