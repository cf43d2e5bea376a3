"""Tokens as the page shows them: the characters each stands for, with a label that has a colour."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hf_ebm.models.energy import EnergyModel

# Labels of the chain's tokens; what is neither is context.
CHANGED, BLANK = "just changed", "free"
CHAIN_COLORS = {CHANGED: "#f59e0b", BLANK: "#93c5fd"}
# Bounds in nats between the labels of scored tokens: probability 0.37, 0.05 and 0.002.
_BOUNDS = (1.0, 3.0, 6.0)
ENERGY_COLORS = {"below 1 nat": "#d1fae5", "1 to 3": "#fde68a", "3 to 6": "#fdba74", "above 6": "#f87171"}

Spans = list[tuple[str, str | None]]


def chain_spans(
    model: EnergyModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    free: Sequence[bool],
    changed: Sequence[bool],
) -> Spans:
    """A chain's tokens (special ones left out, blanks not) with their labels."""
    special = set(model.config.special_token_ids or []) - {model.config.mask_token_id}
    shown = [position for position, token in enumerate(ids) if token not in special]
    labels = [CHANGED if changed[position] else BLANK if free[position] else None for position in shown]
    return _spans(token_texts(tokenizer, [ids[position] for position in shown]), labels)


def energy_spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], energies: Sequence[float]) -> Spans:
    """Tokens labelled by how high their energies in nats are."""
    labels: list[str | None] = [list(ENERGY_COLORS)[sum(energy >= bound for bound in _BOUNDS)] for energy in energies]
    return _spans(token_texts(tokenizer, ids), labels)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The characters that each token adds to the text before it.

    Where a token adds nothing (a space in front) or changes that text (the bytes of one character can be several
    tokens), its name is shown instead.
    """
    texts, before = [], ""
    for text, token in zip(
        tokenizer.batch_decode([list(ids[: end + 1]) for end in range(len(ids))]),
        tokenizer.convert_ids_to_tokens(list(ids)),
        strict=True,
    ):
        texts.append(text[len(before) :] if text.startswith(before) and len(text) > len(before) else token)
        before = text
    return texts


def _spans(texts: list[str], labels: list[str | None]) -> Spans:
    """Spaces in front of a token are spans of their own, so that no colour runs into them."""
    spans: Spans = []
    for text, label in zip(texts, labels, strict=True):
        word = text.lstrip(" ")
        if len(word) < len(text):
            spans.append((" ", None))
        spans.append((word, label))
    return spans
