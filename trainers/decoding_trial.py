"""Whether a model decodes as it is scored, found out by trying it on a few tokens.

Lists of families would have to be kept: some take positions from the mask, some from the pad token, some from neither,
and some keep a state that padding goes into.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_ebm.encoders import encodes_ids, made_up_states
from hf_ebm.model_facts import num_outputs
from hf_ebm.model_modes import evaluation_mode, state_kept
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.losses import at_least_float32
from hf_ebm.random_state import seeded
from hf_ebm.trainers.sequence_pairs import RuledOutTokens, SequencePairs


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
