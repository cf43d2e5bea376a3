"""What `reward_funcs` of a trainer may be: functions, costs and metrics by name, models that score texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from datasets import List
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.checks import as_list, as_whole, check_tokenizer, name_of, shown
from hf_ebm.loading import first_line, loading, moved
from hf_ebm.model_facts import max_length
from hf_ebm.model_modes import evaluation_mode, without_adapters
from hf_ebm.models.adapters import own_tokenizer
from hf_ebm.models.checkpoints import load_whole
from hf_ebm.objectives.costs import SequenceCost
from hf_ebm.objectives.rewards import CostReward, RewardFunction
from hf_ebm.objectives.sequence_costs import COSTS

NEGATIVE = "neg_"  # begins the name of a cost, or of a metric of which less is better


class RewardModel:
    """The output of a classifier with one label, or of a regression: a reward for texts.

    Runs in evaluation mode and without a gradient. It isn't trained, and stays on its device.

    Args:
        model: a sequence classifier of Transformers with `num_labels=1`. Without a `pad_token_id` of its own its
            configuration gets the tokenizer's.
        tokenizer: of the model; one that doesn't pad pads with its end token from now on.
        as_pair: whether it reads prompt and completion as a pair of texts, as of an encoder-decoder, or as one text, as
            of a causal model, whose completion goes on from the prompt.
        batch_size: rows in a forward pass, at most.

    Raises:
        ValueError: for another model, no tokenizer, one that can't pad, or a `batch_size` below 1.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, as_pair: bool = True, batch_size: int = 64
    ):
        labels = getattr(getattr(model, "config", None), "num_labels", None)
        if not isinstance(model, nn.Module) or labels != 1 or not hasattr(without_adapters(model), "num_labels"):
            raise ValueError(
                "a reward model must be a sequence classifier of Transformers with num_labels=1, got "
                f"{type(model).__name__} with num_labels={labels}"
            )
        check_tokenizer("tokenizer", tokenizer)
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise ValueError("tokenizer of a reward model must have a pad_token or an eos_token, got neither")
            tokenizer.pad_token = tokenizer.eos_token
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self.model, self.tokenizer, self.as_pair = model, tokenizer, as_pair
        self.batch_size = as_whole("batch_size", batch_size, 1)
        limits = (max_length(without_adapters(model)), tokenizer.model_max_length)
        self.most = min(limit for limit in limits if limit is not None)
        self.__name__ = os.path.basename(str(model.config._name_or_path).rstrip("/")) or type(model).__name__

    def __call__(self, completions: Sequence[str], prompts: Sequence[str]) -> torch.Tensor:
        """(N,) float32 on the CPU; `ValueError` naming the row for texts longer than the model's positions."""
        scores = []
        with torch.no_grad(), evaluation_mode(self.model):
            for start in range(0, len(completions), self.batch_size):
                rows = slice(start, start + self.batch_size)
                scores.append(self._scores(list(prompts[rows]), list(completions[rows]), start))
        return torch.cat(scores)

    def _scores(self, prompts: list[str], completions: list[str], start: int) -> torch.Tensor:
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        texts = (prompts, completions) if self.as_pair else (whole,)
        batch = self.tokenizer(*texts, padding=True, padding_side="right", return_tensors="pt")
        longest = int(batch["attention_mask"].sum(1).max())
        if longest > self.most:
            row = start + int(batch["attention_mask"].sum(1).argmax())
            raise ValueError(
                f"prompts and completions must fit the {self.most} positions of the reward model {self.__name__}, got "
                f"{longest} tokens in row {row}"
            )
        return self.model(**batch.to(self.model.device)).logits[:, 0].float().cpu()


class MetricReward:
    """A metric of `evaluate`, computed for each completion and its reference alone.

    Args:
        metric: an `evaluate.EvaluationModule`.
        key: of its results; by default the only one, "score", or the one with the metric's name.
        sign: 1, or -1 where less is better.
    """

    def __init__(self, metric: Any, key: str | None = None, sign: int = 1):
        self.metric, self.key, self.sign = metric, key, sign
        kinds = metric.features if isinstance(metric.features, list) else [metric.features]
        self.lists = any(_is_list(kind.get("references")) for kind in kinds)
        self.__name__ = f"{NEGATIVE if sign < 0 else ''}{metric.name}{f':{key}' if key else ''}"

    def __call__(self, completions: Sequence[str], references: Sequence) -> list[float]:
        """Equal rows are computed once. Raises `ValueError` for results without the key, or several without one."""
        found: dict[tuple[str, str], float] = {}
        values = []
        for text, truth in zip(completions, references, strict=True):
            place = (text, repr(truth))
            if place not in found:
                found[place] = self.sign * self._value(text, truth)
            values.append(found[place])
        return values

    def _value(self, text: str, truth: Any) -> float:
        alone = isinstance(truth, str)
        if not alone and not self.lists:
            raise ValueError(f"the metric {self.metric.name} takes one reference, got {shown(truth)}")
        results = self.metric.compute(predictions=[text], references=[[truth] if alone and self.lists else truth])
        numbers = {name: value for name, value in results.items() if isinstance(value, (int, float, np.number))}
        usual = (key for key in (self.key, "score", self.metric.name) if key in numbers)
        key = next(usual, next(iter(numbers), None) if len(numbers) == 1 else None)
        if key is None or (self.key is not None and key != self.key):
            raise ValueError(
                f"the metric {self.metric.name} must be given with one of its results, {', '.join(numbers)}, as "
                f"'{self.metric.name}:RESULT', got {self.key!r}"
            )
        return float(numbers[key])


def _is_list(feature: Any) -> bool:
    return isinstance(feature, (list, List)) or type(feature).__name__ in ("Sequence", "LargeList")


def as_rewards(reward_funcs: Any, as_pair: bool, device: torch.device) -> list[RewardFunction | CostReward]:
    """The reward functions of what users give: one, or a list.

    Args:
        reward_funcs: callables (async ones, too), names, sequence classifiers with one label, and metrics of
            `evaluate`. A name is `neg_` and a cost of `COSTS`; a metric of `evaluate` (`chrf`, `rouge:rougeL`, a
            folder; after `neg_` where less is better); or the folder or Hub name (with its `/`) of a reward model.
        as_pair: as of `RewardModel`.
        device: to which reward models are moved.

    Raises:
        ValueError: for none, something else, or a name that can't be loaded.
    """
    several = isinstance(reward_funcs, (list, tuple))
    given = as_list("reward_funcs", reward_funcs, "reward functions") if several else [reward_funcs]
    if not given:
        raise ValueError("reward_funcs must hold a reward function, got none")
    terms: list[RewardFunction | CostReward] = []
    for one in given:
        term = _as_reward(one, as_pair, device)
        same = sum(other.name.partition("#")[0] == term.name for other in terms)
        terms.append(replace(term, name=f"{term.name}#{same + 1}") if same else term)
    return terms


def _as_reward(given: Any, as_pair: bool, device: torch.device) -> RewardFunction | CostReward:
    if isinstance(given, str):
        return _by_name(given, as_pair, device)
    if callable(getattr(given, "compute", None)) and hasattr(given, "features"):
        return _named(MetricReward(given))
    if isinstance(given, PreTrainedModel):
        return _reward_model(given, str(given.config._name_or_path), as_pair, device)
    if not callable(given) or isinstance(given, (type, nn.Module, SequenceCost)):
        raise ValueError(
            "reward_funcs must be callables, names, sequence classifiers or metrics of evaluate (a SequenceCost is a "
            f"cost), got {shown(given)}"
        )
    return _named(given)


def _by_name(name: str, as_pair: bool, device: torch.device) -> RewardFunction | CostReward:
    cost = COSTS.get(name.removeprefix(NEGATIVE))
    if cost is not None:
        if not name.startswith(NEGATIVE):
            raise ValueError(f"reward_funcs: {name!r} is a cost, of which less is better, must be {NEGATIVE + name!r}")
        return CostReward(name, cost, cost.needs_references)
    path, _, key = name.removeprefix(NEGATIVE).partition(":")
    if os.path.exists(os.path.join(name, "config.json")) or ("/" in name and not os.path.exists(path)):
        with loading(f"reward_funcs: {name!r}"):
            model, _ = load_whole(AutoModelForSequenceClassification.from_pretrained, name, trust_remote_code=False)
        return _reward_model(model, name, as_pair, device)
    import evaluate  # takes a second or two

    try:
        metric = evaluate.load(path, keep_in_memory=True)
    except Exception as error:  # of the network, or of the packages that a metric needs
        known = ", ".join(NEGATIVE + cost for cost in COSTS)
        raise ValueError(
            f"reward_funcs: {name!r} is none of {known}, and no metric of evaluate that can be loaded: "
            f"{first_line(error)}"
        ) from error
    return _named(MetricReward(metric, key or None, -1 if name.startswith(NEGATIVE) else 1))


def _reward_model(model: Any, name: str, as_pair: bool, device: torch.device) -> RewardFunction:
    tokenizer = own_tokenizer(name) if name else None
    if tokenizer is None:
        raise ValueError(f"reward_funcs: {name!r} has no tokenizer; give a RewardModel(model, tokenizer)")
    return _named(RewardModel(moved(model, str(device)), tokenizer, as_pair))


def _named(function: Any) -> RewardFunction:
    return RewardFunction(name_of(function), function)
