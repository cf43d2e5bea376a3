"""Lines of text with their energies, best first."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import check_choice
from hf_ebm.demo.comparison import as_local
from hf_ebm.demo.prompts import read_lines, token_ids
from hf_ebm.models.energy import EnergyModel
from hf_ebm.texts import unknown_of

MAX_LINES = 32
SORT_KEYS = ("energy", "energy per token")
HEADERS = ["rank", "text", "energy", "tokens", "energy per token", "pseudo-perplexity"]


@dataclass(frozen=True)
class ScoredLine:
    """A text with its energy in nats.

    Attributes:
        ids: its scored tokens.
        token_energies: the energy term of each; they sum to `energy`.
        pseudo_perplexity: exponential of the local energy per token.
        unknown: what the tokenizer has no token for.
    """

    text: str
    energy: float
    pseudo_perplexity: float
    ids: list[int]
    token_energies: list[float]
    unknown: list[str]

    @property
    def energy_per_token(self) -> float:
        return self.energy / len(self.ids)


def check_lines(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The lines of a text that can be scored; blank ones are passed over.

    Raises:
        ValueError: without lines or for too many; naming the line (from 1), for one that is too long, has a mask, or
            has nothing to score.
    """
    lines = read_lines(text, MAX_LINES)
    for number, line in enumerate(lines, 1):
        ids = token_ids(model, tokenizer, f"line {number}", line)
        if model.config.mask_token_id in ids:
            raise ValueError(f"line {number} has a blank, which has no energy; fill it under Sample first")
        if all(token in (model.config.special_token_ids or ()) for token in ids):
            raise ValueError(f"line {number} has no token that could be scored: {line!r}")
    return lines


def score_lines(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[ScoredLine]:
    """Scores lines that `check_lines` let pass, in their order."""
    found, local = model.score(lines, tokenizer, unknown_tokens="ignore"), as_local(model)
    of_local = found if local is model else local.score(lines, tokenizer, unknown_tokens="ignore")
    perplexities = (of_local.energy / of_local.num_tokens).exp().tolist()
    return [
        ScoredLine(
            text=line,
            energy=float(found.energy[row]),
            pseudo_perplexity=perplexities[row],
            ids=_ids_of(tokenizer, found.tokens[row]),
            token_energies=found.token_energies[row],
            unknown=list(dict.fromkeys(unknown_of(tokenizer, line).parts)),
        )
        for row, line in enumerate(lines)
    ]


def _ids_of(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(tokens)
    return [ids] if isinstance(ids, int) else ids


def sort_lines(lines: list[ScoredLine], key: str) -> list[ScoredLine]:
    """Lines by one of `SORT_KEYS`, lowest first; ties keep their order."""
    check_choice("sort by", key, SORT_KEYS)
    return sorted(lines, key=lambda line: line.energy if key == "energy" else line.energy_per_token)


def table_rows(lines: list[ScoredLine]) -> list[list]:
    """A row for each line, its columns as in `HEADERS`; numbers with two digits after the point."""
    rows = []
    for rank, line in enumerate(lines, 1):
        numbers = (line.energy, line.energy_per_token, line.pseudo_perplexity)
        energy, per_token, perplexity = (round(number, 2) for number in numbers)
        rows.append([rank, line.text, energy, len(line.ids), per_token, perplexity])
    return rows
