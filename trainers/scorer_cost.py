"""The cost of a sequence under a language model that only scores: minus its log probability."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ebm.checks import as_whole, shown
from hf_ebm.model_facts import check_causal, max_length
from hf_ebm.model_modes import encoded_once, evaluation_mode, state_kept, without_adapters
from hf_ebm.models.adapters import check_in_layers
from hf_ebm.objectives.completions import completion_log_probs, pad_right, sequence_log_probs
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.objectives.sequence_costs import token_ids


class ScorerCost:
    """`-log p(prediction | prompt)` in nats, summed over the tokens of the prediction.

    A causal model reads the prompt followed by the prediction. An encoder-decoder reads the prompt in its encoder, and
    the prediction, which has no start token, as the labels that it shifts by itself. An end token counts where a
    prediction holds it; a prediction without tokens costs 0. Log probabilities are summed in float32 or better.

    Every call runs in evaluation mode and without a gradient, and leaves the model as it was, its mode included.

    Args:
        model: a module with a `config` whose forward takes `input_ids` and `attention_mask` (and `labels`, if
            `config.is_encoder_decoder`, else `use_cache`) and returns an output with `logits` (B, T, V).
        pad_token_id: fills rows up on the right, where nothing reads it; any id of the model will do for a causal one.
        batch_size: rows in a forward pass, at most.

    Raises:
        ValueError: for a `batch_size` below 1, no `pad_token_id`, a model that sees the tokens it scores, or adapters
            that aren't in its layers.
    """

    reads = "ids"

    def __init__(self, model: nn.Module, pad_token_id: int, batch_size: int = 64):
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise ValueError(f"model must be a language model, a module with a config, got {shown(model)}")
        check_in_layers("model", model)
        if (reads := getattr(model, "main_input_name", "input_ids")) != "input_ids":
            raise ValueError(f"model must read token ids, got {type(model).__name__}, which reads {reads}")
        base = without_adapters(model)
        if isinstance(base, PreTrainedModel) and not base.config.is_encoder_decoder:
            check_causal("model", base)
        if pad_token_id is None:
            raise ValueError("pad_token_id must be a token id, got None: any id of the model will do for a causal one")
        self.model = model
        self.pad_token_id = as_whole("pad_token_id", pad_token_id, 0)
        self.batch_size = as_whole("batch_size", batch_size, 1)

    def __call__(
        self, predictions: Sequence[Sequence[int]], references: object, prompts: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """(B,) float32 on the CPU; references aren't read.

        Raises:
            ValueError: for unequally many predictions and prompts, texts, an empty prompt, or a row with more tokens
                than the model has positions for.
        """
        predicted, given = token_ids(predictions, "predictions"), token_ids(prompts, "prompts")
        self._check(predicted, given)
        costs = torch.zeros(len(predicted), dtype=torch.float32)
        rows = [row for row, ids in enumerate(predicted) if ids]
        with torch.no_grad(), evaluation_mode(self.model):
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                with state_kept(self.model):
                    costs[batch] = self._nats([predicted[row] for row in batch], [given[row] for row in batch])
        return costs

    def _check(self, predicted: list[list[int]], given: list[list[int]]) -> None:
        if len(predicted) != len(given):
            raise ValueError(f"predictions and prompts must be equally many, got {len(predicted)} and {len(given)}")
        limit = max_length(without_adapters(self.model))
        for row, (ids, prompt) in enumerate(zip(predicted, given, strict=True)):
            if not prompt:
                raise ValueError(f"prompts must hold a token each, got none in row {row}")
            longest = max(len(prompt), len(ids)) if self._encodes_prompts else len(prompt) + len(ids)
            if limit is not None and longest > limit:
                raise ValueError(
                    f"prompts and predictions must fit the scorer's {limit} positions, got a prompt of {len(prompt)} "
                    f"tokens and a prediction of {len(ids)} in row {row}"
                )

    @property
    def _encodes_prompts(self) -> bool:
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    def _nats(self, predicted: list[list[int]], given: list[list[int]]) -> torch.Tensor:
        device = next(self.model.parameters()).device
        prompts, sequences = ([torch.tensor(ids, device=device) for ids in rows] for rows in (given, predicted))
        if not self._encodes_prompts:
            return -completion_log_probs(self.model, prompts, sequences, self.pad_token_id).float().cpu()
        ids, mask = pad_right(prompts, self.pad_token_id)
        labels, _ = pad_right(sequences, IGNORED)
        with encoded_once(self.model, list(map(tuple, given))):
            logits = self.model(input_ids=ids, attention_mask=mask, labels=labels).logits
        return -sequence_log_probs(logits, labels).float().cpu()
