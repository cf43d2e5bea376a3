"""A batch of inputs and targets, alike for encoder-decoders and for causal models: decode, score, teacher-force.

`decodes_as_scored` tries on a few tokens whether a model decodes as it is scored. Lists of families would have to be
kept: some take positions from the mask, some from the pad token, some from neither, and some keep a state that padding
goes into.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.utils import ModelOutput

from hf_ebm.model_facts import num_outputs, special_ids
from hf_ebm.model_modes import (
    encoded_once,
    encodes_ids,
    evaluation_mode,
    generated_ids,
    made_up_states,
    own_generation_config,
    state_kept,
    without_adapters,
)
from hf_ebm.models.energy.inputs import input_names
from hf_ebm.objectives.completions import (
    completion_token_log_probs,
    ends_at,
    pad_left,
    pad_right,
    split_completions,
    token_log_probs,
)
from hf_ebm.objectives.losses import IGNORED, at_least_float32
from hf_ebm.random_state import seeded
from hf_ebm.trainers.targets import encoder_inputs, num_rows


def _start_token_id(model: PreTrainedModel) -> int:
    """The token from which a decoder starts, where labels don't say it."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for found in special_ids(name, model.generation_config, model.config):
            return found
    raise ValueError("generation_config must have a decoder_start_token_id to decode rows without labels, got none")


class RuledOutTokens(LogitsProcessor):
    """Notes which tokens have probability 0 at each step of `generate`; gives it to some, unless nothing else is left.

    Args:
        never: ids of the latter.
    """

    def __init__(self, never: Sequence[int] = ()) -> None:
        self.never = list(never)
        # Of each call of `generate` the samples that it draws, and (N, V) bool a step, None for nothing.
        self.calls: list[tuple[list[int], list[torch.Tensor | None]]] = []

    def begin(self, samples: Sequence[int]) -> None:
        """Says which samples of a batch, counted through all rows, the next call of `generate` draws."""
        self.calls.append((list(samples), []))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if never := [id for id in self.never if id < scores.shape[1]]:
            left = scores.index_fill(1, torch.tensor(never, device=scores.device), -torch.inf)
            scores = torch.where(left.isneginf().all(1, keepdim=True), scores, left)
        found = scores.softmax(-1) == 0
        self.calls[-1][1].append(found if bool(found.any()) else None)
        return scores

    def of(self, samples: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor | None:
        """What was ruled out at each token of the samples, as `token_log_probs` takes it; None for nothing."""
        some = next((step for _, steps in self.calls for step in steps if step is not None), None)
        if some is None:
            return None
        each: dict[int, torch.Tensor] = {}
        for drawn, steps in self.calls:
            nothing = some.new_zeros(len(drawn), some.shape[1])
            each.update(zip(drawn, torch.stack([nothing if step is None else step for step in steps], 1), strict=True))
        flat = [ids for found in samples for ids in found]
        return torch.cat([each[sample][: len(ids)] for sample, ids in enumerate(flat)])


class SequencePairs:
    """A batch as pairs of a prompt and a target; `of` gives the kind that fits the model.

    Attributes:
        prompts: ids that stand before the targets (causal models) or that are encoded, B tensors (P_b,); none where
            something else is encoded.
        targets: ids, B tensors (T_b,), with their end token; (0,) for a row without labels.
        columns: what the data set holds beside what the model takes, values of all rows by name.
        by_length: decode only rows whose prompts are of one length together, so that none is padded.
    """

    prompts: list[torch.Tensor]
    targets: list[torch.Tensor]
    by_length = False

    def __init__(self, pad_id: int, end_ids: Sequence[int]):
        self.pad_id, self.end_ids = pad_id, list(end_ids)
        self.columns: Mapping[str, Any] = {}

    @staticmethod
    def of(model: PreTrainedModel, inputs: dict, pad_id: int, end_ids: Sequence[int]) -> SequencePairs:
        """The pairs of a batch of `model`."""
        kind = EncoderDecoderPairs if model.config.is_encoder_decoder else CausalPairs
        return kind(model, inputs, pad_id, end_ids)

    def __len__(self) -> int:
        return len(self.targets)

    def log_probs(
        self,
        model: nn.Module,
        rows: Sequence[int],
        sequences: Sequence[torch.Tensor],
        ruled_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """log p(sequence | prompt of its row), in nats, (N,): one forward pass with its gradient.

        Args:
            ruled_out: as for `token_log_probs`, for the tokens of all sequences.
        """
        return self._log_probs(model, rows, sequences, ruled_out)[0].sum(1)

    def token_log_probs(
        self,
        model: nn.Module,
        rows: Sequence[int],
        sequences: Sequence[torch.Tensor],
        ruled_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """log p of every token, sequence after sequence, in nats, (n,); arguments as for `log_probs`."""
        log_probs, kept = self._log_probs(model, rows, sequences, ruled_out)
        return log_probs[kept]

    def _log_probs(
        self,
        model: nn.Module,
        rows: Sequence[int],
        sequences: Sequence[torch.Tensor],
        ruled_out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of tokens in rows, (N, T), 0 outside the sequences, and where these are."""
        raise NotImplementedError

    def decode(
        self,
        model: nn.Module,
        config: GenerationConfig,
        num_samples: int = 1,
        processor: RuledOutTokens | None = None,
        further: Sequence[Callable] = (),
    ) -> list[list[torch.Tensor]]:
        """Decodes every row in evaluation mode: for each, `num_samples` continuations up to their end token.

        Args:
            further: logits processors that come first.
        """
        config = copy.deepcopy(config)
        config.num_return_sequences = num_samples
        processors = LogitsProcessorList([*further, *([] if processor is None else [processor])])
        found: list[list[torch.Tensor]] = [[] for _ in range(len(self))]
        with torch.no_grad(), evaluation_mode(model), state_kept(model), own_generation_config(model, config):
            for rows in self._decoded_together():
                if processor is not None:
                    processor.begin([row * num_samples + sample for row in rows for sample in range(num_samples)])
                decoded_rows = ends_at(self._generate(model, rows, config, processors), self.end_ids)
                for at, row in enumerate(rows):
                    found[row] = decoded_rows[at * num_samples : (at + 1) * num_samples]
        return found

    def _decoded_together(self) -> list[list[int]]:
        """The rows of each call of `generate`."""
        return [list(range(len(self)))]

    def _generate(
        self, model: nn.Module, rows: list[int], config: GenerationConfig, processors: LogitsProcessorList
    ) -> torch.Tensor:
        """Of `num_return_sequences` continuations of each of the rows the ids behind what was given, padded."""
        raise NotImplementedError


class EncoderDecoderPairs(SequencePairs):
    """Sources and targets."""

    def __init__(self, model: PreTrainedModel, inputs: dict, pad_id: int, end_ids: Sequence[int]):
        super().__init__(pad_id, end_ids)
        self.inputs, labels = encoder_inputs(inputs), inputs.get("labels")
        if labels is None:
            labels = torch.full((num_rows(inputs), 1), IGNORED, device=model.device)
        sources, mask = inputs.get("input_ids", ()), inputs.get("attention_mask")
        self.prompts = [ids if mask is None else ids[mask[row].bool()] for row, ids in enumerate(sources)]
        self.targets = [row[row != IGNORED] for row in labels]
        labelled = (labels != IGNORED).any(1)
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is None or not bool(labelled.all()):
            self.starts = labels.new_full((len(labels),), _start_token_id(model))
        else:
            self.starts = labels.new_empty(len(labels))
        if shift is not None and bool(labelled.any()):
            self.starts[labelled] = shift(labels=labels[labelled])[:, 0]
            # mBART and PLBart end their labels with the language that decoding starts from.
            moved = [len(t) > 1 and int(t[-1]) == int(s) and int(s) not in self.end_ids
                     for t, s in zip(self.targets, self.starts, strict=True)]  # fmt: skip
            self.targets = [t[:-1] if m else t for t, m in zip(self.targets, moved, strict=True)]

    def _log_probs(
        self,
        model: nn.Module,
        rows: Sequence[int],
        sequences: Sequence[torch.Tensor],
        ruled_out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.tensor(list(rows), device=self.starts.device)
        labels, _ = pad_right(sequences, IGNORED)
        shifted = torch.cat([self.starts[index, None], labels[:, :-1]], 1)
        given = {name: value for name, value in self.inputs.items() if isinstance(value, (torch.Tensor, ModelOutput))}
        expanded = tree_map(lambda value: value[index], given)
        decoder_input_ids = shifted.masked_fill(shifted == IGNORED, self.pad_id)
        with encoded_once(model, rows):
            outputs = model(**expanded, decoder_input_ids=decoder_input_ids, use_cache=False)
        return token_log_probs(outputs.logits, labels, ruled_out), labels != IGNORED

    def _generate(
        self, model: nn.Module, rows: list[int], config: GenerationConfig, processors: LogitsProcessorList
    ) -> torch.Tensor:
        # Given as ids to go on from, other starts than the model's own would get that one in front of them.
        config.decoder_start_token_id = self.starts.tolist()
        inputs = tree_map(lambda value: value, self.inputs)  # outputs of an encoder are repeated in place
        return generated_ids(model, **inputs, generation_config=config, logits_processor=processors)[:, 1:]


class CausalPairs(SequencePairs):
    """Prefixes and continuations; rows are laid out anew, so it is all one on which side a batch was padded.

    A row without labels is a prefix.

    Raises:
        ValueError: without `input_ids`; for further inputs of the model, which would have to be laid out anew, too; for
            other labels than tokens behind one prompt.
    """

    def __init__(self, model: PreTrainedModel, inputs: dict, pad_id: int, end_ids: Sequence[int]):
        super().__init__(pad_id, end_ids)
        ids, labels = inputs.get("input_ids"), inputs.get("labels")
        if ids is None:
            raise ValueError(f"inputs must have input_ids for a causal model to go on from, got {', '.join(inputs)}")
        for name in sorted((input_names(without_adapters(model)) | {"inputs_embeds"}) & inputs.keys()):
            if torch.is_tensor(inputs[name]) and bool(inputs[name].any()):
                raise ValueError(f"inputs: {name} must be left out; rows of a causal model are ids, mask and labels")
        labels = torch.full_like(ids, IGNORED) if labels is None else labels
        self.prompts, self.targets = split_completions(ids, labels, inputs.get("attention_mask"))

    def _log_probs(
        self,
        model: nn.Module,
        rows: Sequence[int],
        sequences: Sequence[torch.Tensor],
        ruled_out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prompts = [self.prompts[row] for row in rows]
        log_probs = completion_token_log_probs(model, prompts, sequences, self.pad_id, ruled_out)
        starts = torch.tensor([len(prompt) - 1 for prompt in prompts], device=log_probs.device)[:, None]
        lengths = torch.tensor([len(ids) for ids in sequences], device=log_probs.device)[:, None]
        at = torch.arange(log_probs.shape[1], device=log_probs.device)
        return log_probs, (at >= starts) & (at < starts + lengths)

    def _decoded_together(self) -> list[list[int]]:
        if not self.by_length:
            return super()._decoded_together()
        groups: dict[int, list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            groups.setdefault(len(prompt), []).append(row)
        return list(groups.values())

    def _generate(
        self, model: nn.Module, rows: list[int], config: GenerationConfig, processors: LogitsProcessorList
    ) -> torch.Tensor:
        ids, mask = pad_left([self.prompts[row] for row in rows], self.pad_id)
        inputs = {"input_ids": ids, "attention_mask": mask}
        return generated_ids(model, **inputs, generation_config=config, logits_processor=processors)[:, ids.shape[1] :]


class _GivenTokens(RuledOutTokens):
    """Makes `generate` take tokens in an order of its own, and notes the log probability of every token."""

    def __init__(self, never: Sequence[int]) -> None:
        super().__init__(never)
        self.log_probs: list[list[torch.Tensor]] = []  # (N, V) for each step of each call

    def begin(self, samples: Sequence[int]) -> None:
        super().begin(samples)
        self.log_probs.append([])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        log_probs = at_least_float32(super().__call__(input_ids, scores)).log_softmax(-1)
        rows, ids = (torch.arange(length, device=scores.device) for length in scores.shape)
        ranks = (ids * 7919 + rows[:, None] * 31 + len(self.log_probs[-1])) % len(ids)  # others in every row and step
        self.log_probs[-1].append(log_probs)
        taken = ranks.masked_fill(log_probs.exp() == 0, -1).argmax(1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(1, taken, 0.0)

    def of_sequences(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        """The log probability of each sequence while it was decoded, (N,)."""
        found = torch.zeros(len(sequences))
        for (samples, _), steps in zip(self.calls, self.log_probs, strict=True):
            for at, sample in enumerate(samples):
                found[sample] = sum(float(step[at, id]) for step, id in zip(steps, sequences[sample], strict=False))
        return found


def decodes_as_scored(
    model: PreTrainedModel, pad_id: int, end_ids: Sequence[int], *, by_length: bool = False, limit: int | None = None
) -> bool:
    """Whether tokens have the probabilities in `decode` that they have in `log_probs`, in rows of unequal length.

    Found out by decoding a few given tokens. Where they differ, the model takes positions from padding or from its
    cache, or keeps a state that padding goes into.

    Args:
        by_length: as the attribute of `SequencePairs`.
        limit: the most tokens of a row.

    Raises:
        ValueError: for a model that can't be tried.
    """
    ids_apart = (id for id in range(num_outputs(model)) if id not in (pad_id, *end_ids))
    usable = list(islice(ids_apart, 5)) or [pad_id]
    length = 9 if limit is None else min(9, limit)
    steps = max(1, length // 2)
    row = torch.tensor([usable[at % len(usable)] for at in range(max(1, length - steps))], device=model.device)
    ids, mask = pad_right([row, row[len(row) // 2 :]], pad_id)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if not encodes_ids(model):
        inputs = {"encoder_outputs": made_up_states(model, 2)}
    if model.config.is_encoder_decoder:
        inputs["labels"] = row[:1].repeat(2, 2)
    pairs = SequencePairs.of(model, inputs, pad_id, end_ids)
    pairs.by_length = by_length
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=steps, pad_token_id=pad_id, eos_token_id=list(end_ids), use_cache=True
    )
    given = _GivenTokens([pad_id, *end_ids])
    try:
        with seeded(0, model.device), torch.no_grad(), evaluation_mode(model), state_kept(model):
            samples = pairs.decode(model, config, 2, given)  # so that also rows of one length stand beside others
            sequences = [ids for found in samples for ids in found]
            scored = pairs.log_probs(model, [0, 0, 1, 1], sequences, given.of(samples))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, LookupError, RuntimeError) as error:  # of the model's own code
        raise ValueError(f"model: {type(model).__name__} can't be decoded and scored here: {error}") from error
    # A thousandth, as GPUs may compute float32 as TF32; families that differ were off by two thousandths and more.
    allowed = max(torch.finfo(model.dtype).eps ** 0.6, 1e-3) * float(scored.abs().max())
    return float((given.of_sequences(sequences) - scored.cpu()).abs().max()) <= allowed
