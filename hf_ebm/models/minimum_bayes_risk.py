"""Minimum Bayes risk decoding: as a `custom_generate` of Transformers' models (`mbr`), and of texts (`mbr_decode`).

`generate` is what a repository's `custom_generate/generate.py` has, see `publishing.remote_code.write_custom_generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.utils import ModelOutput

from hf_ebm.checks import as_whole, check_choice, check_tokenizer
from hf_ebm.model_facts import generation_limit, source_length, special_ids
from hf_ebm.model_modes import evaluation_mode
from hf_ebm.objectives.bayes_risk import mbr_choice, pairwise_costs
from hf_ebm.objectives.completions import ends_at, pad_left, pad_right
from hf_ebm.objectives.costs import SequenceCost
from hf_ebm.objectives.sequence_costs import as_cost
from hf_ebm.random_state import seeded
from hf_ebm.texts import as_texts, prompt_encoder


@dataclass
class MBROutput(ModelOutput):
    """What `mbr` returns with `return_dict_in_generate`.

    Attributes:
        sequences: what was chosen, (B, T), as `generate` returns it.
        expected_costs: of all candidates, (B, K), as estimated; inf where no reference counted.
        candidates: (B, K, T'), as `generate` returns them.
    """

    sequences: Tensor | None = None
    expected_costs: Tensor | None = None
    candidates: Tensor | None = None


def mbr(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    cost: str | Callable | SequenceCost = "edit_distance",
    processing_class: PreTrainedTokenizerBase | None = None,
    num_references: int | None = None,
    **model_kwargs: Any,
) -> Tensor | MBROutput:
    """Decodes by minimum Bayes risk (Eikema and Aziz 2022): of K candidates the one of the least expected cost.

    `model.generate(**inputs, custom_generate=mbr, do_sample=True, top_k=0, num_return_sequences=16)`

    `generate` makes `num_return_sequences` candidates of each input as its settings say, samples or beams, with the
    encoder run once, and one of them comes back. They are references as well: expectations are means over the first
    `num_references` of them, but for the candidate itself. Of samples without cuts or temperature they are estimates of
    the cost that the model expects; of beams they weigh all references alike.

    Args:
        cost: name of a cost of `hf_ebm.objectives.sequence_costs.COSTS`, or a callable `cost(predictions, references)
            -> (N,)`, smaller is better: a metric with the other sign. It reads texts unless its `reads` is `"ids"`.
        processing_class: decodes texts for costs that read them (`generate` keeps the name `tokenizer` to itself).
        num_references: N, from 2 to K; by default K. Costs are K N for each input.

    Returns:
        Token ids, (B, T), or an `MBROutput`.

    Raises:
        ValueError: for fewer than two candidates, other numbers of references, and a cost that reads texts without a
            `processing_class`.

    Example:
        >>> from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration
        >>> config = LSTMSeq2SeqConfig(vocab_size=9, decoder_vocab_size=9, hidden_size=8)
        >>> model = LSTMSeq2SeqForConditionalGeneration(config).eval()
        >>> settings = {"do_sample": True, "num_return_sequences": 8, "max_new_tokens": 3}
        >>> model.generate(torch.tensor([[4, 7], [5, 6]]), custom_generate=mbr, **settings).shape[0]
        2
    """
    cost, beams, count = as_cost(cost), generation_config.num_beams or 1, generation_config.num_return_sequences or 1
    if count < 2:
        raise ValueError(f"num_return_sequences must be 2 or more, the candidates to choose from, got {count}")
    references = count if num_references is None else as_whole("num_references", num_references, 2, count)
    if cost.reads == "texts":
        check_tokenizer("processing_class", processing_class)
    decode: Any = model._beam_search if beams > 1 else model._sample
    found = decode(
        input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
        generation_config=generation_config, **model_kwargs,
    )  # fmt: skip
    ids = found if isinstance(found, Tensor) else found.sequences
    start, end_ids = input_ids.shape[1], special_ids("eos_token_id", generation_config)
    pad_id = [*special_ids("pad_token_id", generation_config), *end_ids, 0][0]
    completions = ends_at(ids[:, start:], end_ids)
    lists = [row.tolist() for row in completions]
    read: list = lists
    if cost.reads == "texts":
        assert processing_class is not None
        read = processing_class.batch_decode(lists, skip_special_tokens=True)
    rows = [read[at : at + count] for at in range(0, len(read), count)]
    costs, counted = pairwise_costs(cost, rows, references)
    choice = mbr_choice(-costs, counted)
    taken = (choice.chosen + count * torch.arange(len(rows))).tolist()
    sequences, _ = pad_right([torch.cat([ids[at, :start], completions[at]]) for at in taken], pad_id)
    if not generation_config.return_dict_in_generate:
        return sequences
    return MBROutput(sequences, -choice.expected.to(ids.device), ids.unflatten(0, (-1, count)))


def generate(
    model: PreTrainedModel,
    *,
    cost: str | Callable | SequenceCost = "edit_distance",
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_references: int | None = None,
    **given: Any,
) -> Tensor | MBROutput:
    """Decodes by minimum Bayes risk: of `num_return_sequences` candidates that of the least expected cost, see `mbr`.

    Args:
        tokenizer: for costs that read texts.
        given: inputs and settings of `generate`; what Transformers hands over unset is left out.
    """
    given = {name: value for name, value in given.items() if value is not None}
    of_mbr = {"cost": cost, "processing_class": tokenizer, "num_references": num_references}
    decode: Any = model.generate
    return decode(custom_generate=mbr, **of_mbr, **given)


def mbr_decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    *,
    cost: str | Callable | SequenceCost = "edit_distance",
    num_candidates: int = 16,
    num_references: int | None = None,
    candidates: str = "sampling",
    batch_size: int = 8,
    seed: int = 0,
    **settings: Any,
) -> list[str]:
    """Texts by minimum Bayes risk decoding, one for each source; of a causal model what follows it.

    Args:
        cost, num_references: as of `mbr`.
        num_candidates: K, of each source.
        candidates: `"sampling"` from the model's distribution, or `"beams"`, the best K of K beams.
        batch_size: sources decoded together.
        seed: of the samples, which depend on the batches.
        settings: of `generate` (`max_new_tokens`, `epsilon_cutoff`, `temperature`), before those that follow from
            `candidates`.

    Raises:
        ValueError: as of `mbr`; for sources that aren't texts or for which the model has no positions, and
            `num_return_sequences` among the settings.

    Example:
        >>> from hf_ebm.assets import load_embedded_causal
        >>> model, tokenizer = load_embedded_causal()
        >>> len(mbr_decode(model, tokenizer, ["and god said"], num_candidates=4, max_new_tokens=5))
        1
    """
    check_tokenizer("tokenizer", tokenizer)
    sources = as_texts("sources", sources)
    count, batch_size = as_whole("num_candidates", num_candidates, 2), as_whole("batch_size", batch_size, 1)
    check_choice("candidates", candidates, ("sampling", "beams"))
    if "num_return_sequences" in settings:
        raise ValueError("settings must not have num_return_sequences, which is num_candidates here")
    way = {"do_sample": True, "top_k": 0, "num_beams": 1} if candidates == "sampling" else {
        "do_sample": False, "num_beams": count,
    }  # fmt: skip
    of_mbr = {"cost": cost, "processing_class": tokenizer, "num_references": num_references}
    decode: Any = model.generate
    chosen: list[str] = []
    with evaluation_mode(model), seeded(seed, model.device):
        for at in range(0, len(sources), batch_size):
            inputs = _inputs(model, tokenizer, sources[at : at + batch_size])
            ids = decode(**inputs, custom_generate=mbr, num_return_sequences=count, **of_mbr, **{**way, **settings})
            start = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
            chosen += tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
    return chosen


def _inputs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[str]) -> dict[str, Tensor]:
    """Sources as an encoder reads them, or as prompts, without the end that a tokenizer may put behind a text."""
    if model.config.is_encoder_decoder:
        batch, limit = tokenizer(sources, padding=True, return_tensors="pt"), source_length(model)
        if limit is not None and batch["input_ids"].shape[1] > limit:
            raise ValueError(
                f"sources must have at most {limit} tokens, the positions of the encoder, got "
                f"{batch['input_ids'].shape[1]}"
            )
        return {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    ends = special_ids("eos_token_id", model.generation_config, model.config)
    if not ends:
        raise ValueError("generation_config must have an eos_token_id, got none: no end of a prompt can be told")
    prompts = [torch.tensor(ids, device=model.device) for ids in prompt_encoder(tokenizer, ends[0])(sources)]
    limit, longest = generation_limit(model), max(map(len, prompts))
    if limit is not None and longest >= limit:
        raise ValueError(f"sources must leave room for a token, got one of {longest} with {limit} positions")
    ids, mask = pad_left(prompts, [*special_ids("pad_token_id", model.generation_config, model.config), *ends][0])
    return {"input_ids": ids, "attention_mask": mask}
