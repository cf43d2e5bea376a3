"""`"energy-scoring"`: energies of texts."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.scoring_energy import ScoreOutput
from hf_ebm.pipelines.rows import RowPipeline


class EnergyScoringPipeline(RowPipeline):
    """Texts to their energies, by `EnergyModel.score`.

    A result is a dict: `text`; `energy` in nats; `num_tokens`, how many are scored; `pseudo_perplexity`,
    `exp(energy / num_tokens)`, `None` for raw energies and for a text without tokens; `tokens` and their
    `token_energies`, which sum to `energy`.

    Arguments of a call: `variant`, `stride`, `token_budget` and `further_inputs` of `EnergyModel.score`, the last one
    number for all texts by name.
    """

    model_classes: ClassVar = (EnergyModel,)
    model: EnergyModel

    def arguments(self) -> tuple[str, ...]:
        return ("variant", "stride", "token_budget", "further_inputs")

    def prepared(self, item: object) -> str:
        if not isinstance(item, str):
            raise ValueError(f"inputs must be texts, got {type(item).__name__}")
        return item

    def run_batch(self, rows: list[str], numbers: list[int], **arguments: Any) -> list[dict]:
        found = self.model.score(rows, self.spelling, unknown_tokens="ignore", **arguments)
        return [
            {
                "text": text,
                "energy": float(found.energy[row]),
                "num_tokens": int(found.num_tokens[row]),
                "pseudo_perplexity": _pseudo_perplexity(found, row),
                "tokens": found.tokens[row],
                "token_energies": found.token_energies[row],
            }
            for row, text in enumerate(rows)
        ]


def _pseudo_perplexity(found: ScoreOutput, row: int) -> float | None:
    if found.pseudo_perplexity is None or not int(found.num_tokens[row]):
        return None
    return float(found.pseudo_perplexity[row])
