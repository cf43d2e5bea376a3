"""`EnergyModel.score_variants`: variants of a reference sequence in the notation of the field, and their scores.

A thin layer over `hf_ebm.scoring.mutations`. A variant is a set of changes of letters; each letter is one token.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_ebm.checks import as_string, as_whole, check_choice, check_tokenizer
from hf_ebm.model_facts import limit_of
from hf_ebm.model_modes import evaluation_mode, model_output
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.models.energy.encoding import check_encoded, check_same_mask
from hf_ebm.models.energy.inputs import check_energy_inputs, mask_id_of
from hf_ebm.objectives.completions import pad_right
from hf_ebm.random_state import generator_of
from hf_ebm.runtime import where_float64_is
from hf_ebm.sampling.fill_estimates import drawn_fills, estimated_log_partition, log_weights
from hf_ebm.scoring.energies import token_energies
from hf_ebm.scoring.joint_fills import fill_energies, num_joint_rows
from hf_ebm.scoring.masked_batches import MaskedBatchRunner
from hf_ebm.scoring.mutations import SCHEMES, Substitutions, joint_log_probs, joint_space, substitution_scores
from hf_ebm.scoring.rows import BadLogitsError, Context
from hf_ebm.texts import as_texts, tokenized

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

# Sequences whose masked rows form one pool.
_SEQUENCES_PER_POOL = 256
# Of one set of sites, with the scheme "joint_log_prob".
_MOST_JOINT_ROWS = 200_000
_NUMBER = r"(-?\d+)"
_CHANGES = {
    "substitution": re.compile(rf"(\D){_NUMBER}([^\d\s])"),
    "deletion": re.compile(rf"(\D){_NUMBER}(?:_(\D){_NUMBER})?del(?:ins([^\d\s]+))?"),
    "insertion": re.compile(rf"(\D){_NUMBER}_(\D){_NUMBER}ins([^\d\s]+)"),
}


@model_output
class VariantScores(ModelOutput):
    """Scores of N variants, in their order.

    Args:
        scores: (N,) in nats, float64; above 0 where the model prefers the variant to the reference (but for
            `"joint_log_prob"` and `"sampled_joint_log_prob"`, log probabilities).
        scheme: by which they are.
        num_rows: masked rows that were run.
        errors: (N,) standard errors of `"sampled_joint_log_prob"`; else `None`.
    """

    scores: Tensor
    scheme: str
    num_rows: int
    errors: Tensor | None = None


class Change(NamedTuple):
    """Letters `start` to before `stop` of the reference, counted from 0, become `letters`."""

    start: int
    stop: int
    letters: str

    @property
    def is_substitution(self) -> bool:
        return self.stop - self.start == 1 == len(self.letters)


def parse_variant(variant: str, reference: str, offset: int = 1) -> list[Change]:
    """Changes in the order of their positions.

    Args:
        variant: changes separated by `:`, `,` or `;`, as `A24G`, `A24del`, `A24_K30del`, `A24_K25insQRS` and
            `A24_K30delinsQ`.
        reference: its letters.
        offset: the number of its first letter.

    Raises:
        ValueError: for another notation, positions outside the reference, another letter there, changes that overlap.

    Example:
        >>> parse_variant("K2R:T3del", "MKT")
        [Change(start=1, stop=2, letters='R'), Change(start=2, stop=3, letters='')]
    """
    changes = sorted(_change(part.strip(), reference, offset) for part in re.split("[:,;]", variant))
    for one, other in itertools.pairwise(changes):
        if other.start < one.stop or one[:2] == other[:2]:
            raise ValueError(f"two changes overlap at position {other.start + offset}")
    return changes


def _change(text: str, reference: str, offset: int) -> Change:
    if match := _CHANGES["substitution"].fullmatch(text):
        letter, number, new = match.groups()
        start = _place(letter, number, reference, offset)
        return Change(start, start + 1, new)
    if match := _CHANGES["deletion"].fullmatch(text):
        letter, number, last_letter, last, new = match.groups()
        start = _place(letter, number, reference, offset)
        stop = start + 1 if last is None else _place(last_letter, last, reference, offset) + 1
        if stop <= start:
            raise ValueError(f"{text!r} ends before it begins")
        return Change(start, stop, new or "")
    if match := _CHANGES["insertion"].fullmatch(text):
        letter, number, next_letter, after, new = match.groups()
        start = _place(letter, number, reference, offset) + 1
        if _place(next_letter, after, reference, offset) != start:
            raise ValueError(f"{text!r} must name two neighbours")
        return Change(start, start, new)
    raise ValueError(
        f"{text!r} is no change; changes are like A24G, A24del, A24_K30del, A24_K25insQRS, A24_K30delinsQ, several "
        "separated by ':'"
    )


def _place(letter: str, number: str, reference: str, offset: int) -> int:
    place = int(number) - offset
    if not 0 <= place < len(reference):
        raise ValueError(
            f"position {number} is outside the reference, whose positions are {offset} to {offset + len(reference) - 1}"
        )
    if reference[place] != letter:
        raise ValueError(f"the reference has {reference[place]!r} at position {number}, not {letter!r}")
    return place


class Spelling:
    """How a tokenizer spells a reference: a token a letter, the same wherever the letter stands.

    Args:
        reference: letters; white space between them doesn't count. A tokenizer that takes letters for words (as of
            ProtBert) gets spaces between them.

    Attributes:
        letters: the reference without white space.
        ids: its token ids, special ones included.
        columns: where each letter stands in them.

    Raises:
        ValueError: for a tokenizer that spells otherwise, or has no token for a letter.
    """

    def __init__(self, model: EnergyModel, tokenizer: PreTrainedTokenizerBase, reference: str):
        self.letters = "".join(as_string("reference", reference).split())
        if not self.letters:
            raise ValueError("reference must hold a letter, got none")
        self._tokenizer, self._special = tokenizer, set(model.config.special_token_ids or [])
        for separator in ("", " "):
            self._separator = separator
            self.ids, self.columns = self._encoded(self.letters)
            self._tokens = dict(zip(self.letters, (self.ids[column] for column in self.columns), strict=False))
            spelled = [self._tokens.get(letter) for letter in self.letters]
            if len(self.columns) == len(self.letters) and spelled == [self.ids[column] for column in self.columns]:
                break
        else:
            raise ValueError(
                f"tokenizer must have a token for each letter of the reference, the same wherever it stands; "
                f"{type(tokenizer).__name__} has {len(self.columns)} tokens for {len(self.letters)} letters"
            )
        for place, letter in enumerate(self.letters):
            self._check_known("reference", letter, self._tokens[letter], f" (letter {place + 1})")

    def token(self, name: str, letter: str) -> int:
        """The token of a letter. Raises `ValueError`, saying of what (`name`), where there is none of its own."""
        if letter not in self._tokens:
            ids, columns = self._encoded(letter + self.letters[1:])
            if columns != self.columns or ids[columns[0] + 1 :] != self.ids[columns[0] + 1 :]:
                raise ValueError(f"{name}: the tokenizer has no token for the letter {letter!r} alone")
            self._check_known(name, letter, ids[columns[0]])
            self._tokens[letter] = ids[columns[0]]
        return self._tokens[letter]

    def changed(self, name: str, changes: Sequence[Change]) -> list[int]:
        """Token ids of the reference with changes."""
        tokens = [self.ids[column] for column in self.columns]
        for change in reversed(changes):
            tokens[change.start : change.stop] = [self.token(name, letter) for letter in change.letters]
        return [*self.ids[: self.columns[0]], *tokens, *self.ids[self.columns[-1] + 1 :]]

    def _encoded(self, letters: str) -> tuple[list[int], list[int]]:
        ids = list(tokenized(self._tokenizer, "reference", 0, self._separator.join(letters))["input_ids"])
        return ids, [column for column, token in enumerate(ids) if token not in self._special]

    def _check_known(self, name: str, letter: str, token: int, where: str = "") -> None:
        if token == self._tokenizer.unk_token_id:
            raise ValueError(f"{name}: the tokenizer has no token for the letter {letter!r}{where}")


@torch.no_grad()
def score_variants(
    model: EnergyModel,
    reference: str,
    variants: Iterable[str] | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    *,
    scheme: str = "masked_marginals",
    offset: int = 1,
    letters: str | None = None,
    num_draws: int = 256,
    seed: int = 0,
    token_budget: int | None = None,
    further_inputs: Mapping[str, Any] | None = None,
) -> VariantScores:
    """Scores of variants of a sequence of letters, such as a protein, in nats.

    Args:
        reference: the wild type.
        variants: changes in each, `"A24G"` or `"A24G:K30R"`, insertions and deletions as in `"A24del"`,
            `"A24_K30del"`, `"A24_K25insQRS"`, `"A24_K30delinsQ"`.
        tokenizer: the model's; it has a token for each letter.
        scheme: `"masked_marginals"` (each mutated site masked alone in the reference), `"masked_marginals_together"`,
            `"wild_type_marginals"`, `"mutant_marginals"` (nothing is masked), `"joint"` (log ratio of mutant and
            reference in the joint distribution `exp(-E)` of the mutated sites given the others), `"joint_log_prob"`
            (the mutant's log probability there), `"sampled_joint_log_prob"` (an estimate of it, for more sites) or
            `"pseudo_likelihood_ratio"` (difference of whole energies, alone in taking insertions and deletions).
        offset: the number of the reference's first letter.
        letters: what may stand at a site, for log probabilities; by default all that the model may propose.
        num_draws: of each set of sites, for `"sampled_joint_log_prob"`: the mean of their weights estimates the
            normalizer, with an error that halves with four times as many.
        seed: of the draws, which are the same for a set of sites whatever the others are.
        token_budget: tokens per forward pass; by default from free memory.
        further_inputs: what else the model reads, one number for all, by name.

    Raises:
        ValueError: before any work, naming the variant's row, for another notation, a wrong letter of the reference, a
            position outside, a letter without a token, insertions and deletions by another scheme, and sets of sites
            that are too large for `"joint_log_prob"`; for encoder-decoder models.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> found = model.score_variants("light", ["l1n", "l1s:t5s", "h4s"], tokenizer)
        >>> found.scores.shape, found.num_rows  # the sites 1, 4 and 5, each masked once
        (torch.Size([3]), 3)
    """
    check_choice("scheme", scheme, SCHEMES)
    check_tokenizer("tokenizer", tokenizer)
    check_same_mask(tokenizer, mask_id_of(model))
    if model.mlm.config.is_encoder_decoder:
        raise ValueError(f"score_variants: {type(model.mlm).__name__} is an encoder-decoder; its energy is conditional")
    rows = as_texts("variants", variants)
    spelling = Spelling(model, tokenizer, reference)
    start = as_whole("offset", offset)
    changes = [_named(row, text, parse_variant, text, spelling.letters, start) for row, text in enumerate(rows)]
    whole = scheme == "pseudo_likelihood_ratio"
    for row, own in enumerate(changes):
        if not whole and not all(change.is_substitution for change in own):
            raise ValueError(
                f"variants: row {row}: {rows[row]!r}: scheme {scheme!r} scores substitutions alone; "
                "'pseudo_likelihood_ratio' takes insertions and deletions, too"
            )
    mutants = [spelling.changed(f"variants: row {row}: {rows[row]!r}", own) for row, own in enumerate(changes)]
    limit = limit_of(model.mlm, model.config.max_sequence_length, tokenizer)
    check_encoded(model, limit, "reference", 0, spelling.ids)
    for row, ids in enumerate(mutants):
        check_encoded(model, limit, "variants", row, ids)
    sampled = scheme == "sampled_joint_log_prob"
    candidates = _candidates(model, spelling, letters) if sampled or scheme == "joint_log_prob" else None
    draws = as_whole("num_draws", num_draws, 2), as_whole("seed", seed, 0)
    errors = None
    runner = model.masked_batch_runner(token_budget)
    with evaluation_mode(model):
        if whole:
            energies = _energies(model, runner, [*mutants, spelling.ids], further_inputs or {})
            scores = energies[-1] - energies[:-1]
            return VariantScores(scores=scores, scheme=scheme, num_rows=runner.num_rows)
        sequences, _ = check_energy_inputs(
            model, torch.tensor([spelling.ids]), None, None, None, None, further_inputs or {}
        )
        put = [_substitutions(spelling, ids) for ids in mutants]
        own = sequences.ids[0]
        try:
            if candidates is None:
                scores = substitution_scores(runner, own, put, scheme, model.config.energy, sequences.context)
            else:
                columns = [[spelling.columns[change.start] for change in one] for one in changes]
                joint = _Joint(model, runner, own, rows, columns, mutants, candidates, sequences.context)
                scores, errors = joint.estimated(*draws) if sampled else (joint.exact(), None)
        except BadLogitsError as error:
            raise BadLogitsError(error.row, error.position, "variants: row") from error
    return VariantScores(scores=scores, scheme=scheme, num_rows=runner.num_rows, errors=errors)


def _named(row: int, text: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"variants: row {row}: {text!r}: {error}") from error


def _substitutions(spelling: Spelling, ids: list[int]) -> Substitutions:
    return tuple((column, ids[column]) for column in spelling.columns if ids[column] != spelling.ids[column])


def _energies(
    model: EnergyModel, runner: MaskedBatchRunner, rows: list[list[int]], further_inputs: Mapping[str, Any]
) -> Tensor:
    """Energies (N,) of sequences, of equal ones once."""
    first_rows: dict[tuple[int, ...], int] = {}
    for row, own in enumerate(rows):
        first_rows.setdefault(tuple(own), row)
    different, found = list(first_rows), []
    for first in range(0, len(different), _SEQUENCES_PER_POOL):
        pool = different[first : first + _SEQUENCES_PER_POOL]
        ids, attention_mask = pad_right([torch.tensor(own) for own in pool], 0)
        sequences, scored = check_energy_inputs(model, ids, attention_mask, None, None, None, further_inputs)
        users = torch.tensor([first_rows[own] for own in pool], device=scored.device)
        try:
            terms = token_energies(runner, replace(sequences, numbers=users), scored, model.config.energy)
        except BadLogitsError as error:
            raise BadLogitsError(error.row, error.position, "variants: row") from error
        found.append(terms.cpu().double().sum(1))
    numbers = {own: number for number, own in enumerate(different)}
    return torch.cat(found)[[numbers[tuple(own)] for own in rows]]


def _candidates(model: EnergyModel, spelling: Spelling, letters: str | None) -> Tensor:
    """Token ids (K,) that may stand at a site."""
    if letters is None:
        return proposal_support(model, None).nonzero()[:, 0].to(where_float64_is(model.input_device))
    own = [spelling.token("letters", letter) for letter in as_string("letters", letters)]
    if not own:
        raise ValueError("letters must hold a letter, got none")
    return torch.tensor(list(dict.fromkeys(own)), device=where_float64_is(model.input_device))


class _Joint:
    """Log probabilities of variants in the joint distribution of their sites, set of sites by set of sites."""

    def __init__(
        self,
        model: EnergyModel,
        runner: MaskedBatchRunner,
        reference: Tensor,
        rows: list[str],
        columns: list[list[int]],
        mutants: list[list[int]],
        candidates: Tensor,
        context: Context | None,
    ):
        self.runner, self.energy, self.rows, self.num_letters = runner, model.config.energy, rows, len(candidates)
        number = {token: place for place, token in enumerate(candidates.tolist())}
        self.members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.choices = []
        for row, (sites, ids) in enumerate(zip(columns, mutants, strict=True)):
            self.members[tuple(sites)].append(row)
            missing = [column for column in sites if ids[column] not in number]
            if missing:
                raise ValueError(
                    f"variants: row {row}: {rows[row]!r} has a letter that isn't among the letters allowed"
                )
            self.choices.append([number[ids[column]] for column in sites])
        where = reference.to(candidates.device), candidates
        self.spaces = {sites: joint_space(sites, *where, context) for sites in self.members}

    def exact(self) -> Tensor:
        """(N,), a table for each set of sites."""
        for sites, space in self.spaces.items():
            if (needed := num_joint_rows(space)) > _MOST_JOINT_ROWS:
                row = self.members[sites][0]
                raise ValueError(
                    f"variants: row {row}: {self.rows[row]!r} needs {needed} masked rows with {self.num_letters} "
                    f"letters at {len(sites)} sites; give fewer letters, or take scheme 'sampled_joint_log_prob' or "
                    "'joint'"
                )
        scores = torch.empty(len(self.rows), dtype=torch.float64)
        for sites, members in self.members.items():
            scores[members] = joint_log_probs(self.runner, self.spaces[sites], self._chosen(members), self.energy)
        return scores

    def estimated(self, num_draws: int, seed: int) -> tuple[Tensor, Tensor]:
        """(N,) and their standard errors, which are those of log Z."""
        scores, errors = torch.empty(2, len(self.rows), dtype=torch.float64)
        for sites, members in self.members.items():
            space = self.spaces[sites]
            if len(sites) == 1:  # every draw weighs Z itself, which takes one row
                chosen = self._chosen(members)
                scores[members], errors[members] = joint_log_probs(self.runner, space, chosen, self.energy), 0.0
                continue
            uniforms = torch.from_numpy(generator_of(seed, *sites).random((num_draws, len(sites))))
            draws = drawn_fills(self.runner, space, uniforms.to(space.ids.device), range(len(sites)))
            partition = estimated_log_partition(log_weights(self.runner, space, draws, self.energy, 1.0, None).cpu())
            ids = space.filled(self._chosen(members).to(space.ids.device))
            energies = fill_energies(self.runner, space, ids, self.energy).cpu()
            scores[members], errors[members] = -energies - partition.value, partition.error
        return scores, errors

    def _chosen(self, members: list[int]) -> Tensor:
        return torch.tensor([self.choices[row] for row in members])
