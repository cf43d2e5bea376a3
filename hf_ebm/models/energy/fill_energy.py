"""`EnergyModel.fill`: the likeliest fills of all blanks of a text together. A thin layer over `hf_ebm.scoring`.

A method is chosen for each row: exact over the whole support, exact over candidate sets, or chains.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput, logging

from hf_ebm.checks import as_number, as_whole, check_choice, check_tokenizer
from hf_ebm.model_modes import evaluation_mode, model_output
from hf_ebm.models.energy.blank_rows import blank_rows
from hf_ebm.models.energy.blanks import as_rules
from hf_ebm.models.energy.encoding import check_same_mask
from hf_ebm.models.energy.fill_methods import FillTask, Found, FoundFill, can_be_chained, filled
from hf_ebm.models.energy.inputs import mask_id_of
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, as_extra_energies
from hf_ebm.scoring.rows import BadLogitsError

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

READINGS = ("joint", "independent", "sequential")
METHODS = ("auto", "exact", "candidates", "chains")


class Word(NamedTuple):
    """What may stand in a blank.

    Attributes:
        probability: its marginal probability.
        tokens: ids of its pieces.
        token_str: its text.
        error: the probability's standard error, with chains; else `None`.
    """

    probability: float
    tokens: list[int]
    token_str: str
    error: float | None


class Fill(NamedTuple):
    """A fill of all blanks.

    Attributes:
        probability: of the fill.
        energy: in nats, extra energies included; with the readings that have none, minus its log probability.
        tokens: of each blank the ids of its pieces.
        token_strs: of each blank the text.
        sequence: the text of the whole.
        error: the probability's standard error, with chains; else `None`.
    """

    probability: float
    energy: float
    tokens: list[list[int]]
    token_strs: list[str]
    sequence: str
    error: float | None


@model_output
class FillOutput(ModelOutput):
    """Joint fills of N texts, in the order of the texts.

    Args:
        fills: per text its likeliest fills, best first.
        marginals: per text and blank the likeliest words.
        method: per text, how they were found: `"exact"`, `"candidates"` or `"chains"`.
        log_partition: (N,) log Z of `exp(-E/τ)` over all fills (float64), an estimate but for `"exact"`; of the other
            readings, the log of the probability that they give to all fills that the rules allow.
        left_out: (N,) share of the probability that isn't of the fills looked at; an estimate, of the other readings a
            bound; 0 where all were looked at.
        left_out_error: (N,) its standard error.
        r_hat: (N,) split R-hat of the energies of the chains, NaN without any.
        num_masked_rows: masked rows run through the masked language model.
    """

    fills: list[list[Fill]]
    marginals: list[list[list[Word]]]
    method: list[str]
    log_partition: Tensor
    left_out: Tensor
    left_out_error: Tensor
    r_hat: Tensor
    num_masked_rows: int


@torch.no_grad()
def fill(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike | Tensor,
    tokenizer: PreTrainedTokenizerBase,
    top_k: int = 10,
    *,
    reading: str = "joint",
    method: str = "auto",
    temperature: float = 1.0,
    words: Sequence[str] | Sequence[Sequence[str] | None] | None = None,
    pieces: int | tuple[int, int] | list[int | tuple[int, int] | None] | None = None,
    equal: Sequence[int] | Sequence[Sequence[int]] | None = None,
    different: Sequence[int] | Sequence[Sequence[int]] | None = None,
    pattern: str | None = None,
    extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
    attention_mask: Tensor | None = None,
    encoder_texts: Iterable[str] | None = None,
    row_limit: int = 16_384,
    seed: int = 0,
    token_budget: int | None = None,
    further_inputs: Mapping[str, Any] | None = None,
    unknown_tokens: str = "warn",
) -> FillOutput:
    """The likeliest fills of all masks of a text together, and the marginal distribution of each.

    The target is that of `generate`: `exp(-E/τ)`, E being the energy of what fills the masks, given the rest. Of m
    blanks with K candidates each `m K^(m-1)` masked rows give the energies of all `K^m` fills.

    Args:
        texts: with mask tokens, each a blank; or token ids (B, T).
        tokenizer: the model's tokenizer.
        top_k: fills that are returned, and words of each blank.
        reading: `"joint"`; or one of two others of the same model: `"independent"`, the product of what it says of each
            blank while all are masked, or `"sequential"`, blanks filled from left to right. Over several numbers of
            pieces, these give all of them the same probability.
        method: `"exact"` lists all fills; `"candidates"` those of the likeliest words of each blank, as many as
            `row_limit` allows, and estimates what is left out; `"chains"` samples, with marginals that are
            Rao–Blackwellised. `"auto"` takes the first that `row_limit` allows, and chains where candidate sets leave
            out more than a tenth, for single tokens.
        temperature: τ of the target.
        words: that may fill the blanks; a list for each blank, or `None`, where they differ. A word is tokenized where
            the blank is, and may have several pieces.
        pieces: how many tokens a blank stands for: a number, or a pair (least, most); a list has one for each blank.
            The fill is a word then, where tokens tell: its first piece begins one, the others go on. By default a
            blank is one token, any that may be proposed, or what `words` have. The numbers compete by `exp(-E/τ)`.
        equal, different: numbers of blanks, from 0, that hold the same word, or different ones; or several such groups.
        pattern: a regular expression that is found in the text of the result.
        extra_energies: as for `generate`, for the joint reading.
        attention_mask: with ids, (B, T), 0 at padding.
        encoder_texts: per text, what an encoder-decoder model conditions on (required there).
        row_limit: masked rows of a text, for `"auto"`, and the size of candidate sets and of chains.
        seed: of draws and chains, which are the same for a text whatever the others are.
        token_budget: tokens per forward pass; by default from free memory.
        further_inputs: what else the model reads, by name: a number for each text, or one for all.
        unknown_tokens: as for `score`.

    Raises:
        ValueError: before any work, naming row and blank, for what can't be filled as asked; where no fill is allowed.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> out = model.fill("the king of [MASK] and the king of [MASK]", tokenizer, words=["israel", "judah", "bread"])
        >>> out.fills[0][0].sequence, out.method, len(out.fills[0])
        ('the king of judah and the king of judah', ['exact'], 9)
    """
    top_k, row_limit = as_whole("top_k", top_k, 1), as_whole("row_limit", row_limit, 1)
    seed, temperature = as_whole("seed", seed, 0), as_number("temperature", temperature, above=0)
    check_choice("reading", reading, READINGS)
    check_choice("method", method, METHODS)
    check_tokenizer("tokenizer", tokenizer)
    check_same_mask(tokenizer, mask_id_of(model))
    rules = as_rules(words, pieces, equal, different, pattern)
    extra = as_extra_energies(extra_energies)
    if reading != "joint" and (extra or temperature != 1 or method == "chains"):
        raise ValueError(f"extra_energies, temperature and chains have no effect with reading={reading!r}")
    runner = model.masked_batch_runner(token_budget)
    with evaluation_mode(model):
        rows = blank_rows(model, texts, tokenizer, rules, attention_mask, encoder_texts, further_inputs, unknown_tokens)
        tasks = []
        for row, own in enumerate(rows):
            how = (reading, temperature, top_k, row_limit, seed)
            if method == "chains" and not can_be_chained(own.layouts):
                raise ValueError(_unchained(row))
            tasks.append(FillTask(model, runner, own.layouts, extra, own.source, own.further_inputs, *how))
        found = []
        for row, task in enumerate(logging.tqdm(tasks, desc="Filling", unit="text", delay=2, leave=False)):
            try:
                found.append(filled(task, method))
            except BadLogitsError as error:
                raise BadLogitsError(row, error.position, "texts: row") from error
            if not found[-1].fills:
                raise ValueError(f"texts: no fill of row {row} is allowed by the rules and extra_energies")
    return _output(found, tokenizer, runner.num_rows + sum(own.rows_of_chains for own in found))


def _unchained(row: int) -> str:
    return (
        f"method: chains move one token at a time, which row {row} doesn't let them: its blanks are equal, have "
        "several numbers of pieces, or words of several pieces; 'candidates' lists the likeliest fills"
    )


def _output(found: list[Found], tokenizer: PreTrainedTokenizerBase, num_rows: int) -> FillOutput:
    def spelled(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens)).strip()

    def numbers(name: str) -> Tensor:
        return torch.tensor([getattr(own, name) for own in found], dtype=torch.float64)

    def fill_of(own: FoundFill) -> Fill:
        tokens = [own.ids[at].tolist() for at in own.positions]
        text = str(tokenizer.decode(own.ids, skip_special_tokens=True))
        return Fill(own.probability, own.energy, tokens, [spelled(word) for word in tokens], text, own.error)

    fills = [[fill_of(fill) for fill in own.fills] for own in found]
    marginals = [
        [
            [Word(one.probability, one.tokens, spelled(one.tokens), one.error) for one in words]
            for words in own.marginals
        ]
        for own in found
    ]
    return FillOutput(
        fills=fills,
        marginals=marginals,
        method=[own.method for own in found],
        log_partition=numbers("log_partition"),
        left_out=numbers("left_out"),
        left_out_error=numbers("left_out_error"),
        r_hat=numbers("r_hat"),
        num_masked_rows=num_rows,
    )
