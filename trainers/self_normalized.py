"""Self-normalized teacher forcing: `SelfNormalizedConfig`, `SelfNormalizedTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from hf_ebm.objectives.token_losses import cross_entropy_sum, log_normalizers, num_tokens
from hf_ebm.plain_values import as_number
from hf_ebm.publishing import citations
from hf_ebm.trainers.search_aware import LossTerms, SearchAwareConfig, SearchAwareTrainer


@dataclass
class SelfNormalizedConfig(SearchAwareConfig):
    """Arguments of `SelfNormalizedTrainer`, beside those of `Seq2SeqTrainingArguments`.

    Args:
        log_z_weight: lambda, the weight of the squared log normalizer; 0 reports it without changing it.

    Raises:
        ValueError: for a negative weight.
    """

    smooths_labels: ClassVar[bool] = False
    log_z_weight: float = field(default=0.5, metadata={"help": "Weight of the squared local log normalizer."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log_z_weight = as_number("log_z_weight", self.log_z_weight, least=0)


class SelfNormalizedTrainer(SearchAwareTrainer):
    """`cross entropy + lambda * (log Z)^2` at every token (Goyal, Dyer and Berg-Kirkpatrick 2019, section 3.2.1).

    Logs `cross_entropy`, `log_z_mean` and `log_z_variance`, in nats, in training and in evaluation.
    """

    config_class: ClassVar[type[SelfNormalizedConfig]] = SelfNormalizedConfig
    args: SelfNormalizedConfig
    bibtex = (citations.GOYAL_2019,)
    evaluated_terms = ("cross_entropy", "log_z_mean", "log_z_square")

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        labels = inputs["labels"]
        logits = model(**inputs).logits
        cross_entropy, log_z = cross_entropy_sum(logits, labels), log_normalizers(logits, labels)
        tokens = num_tokens(labels)
        return LossTerms(
            cross_entropy + self.args.log_z_weight * log_z.sum_of_squares,
            tokens,
            {
                "cross_entropy": (cross_entropy, tokens),
                "log_z_mean": (log_z.sum, tokens),
                "log_z_square": (log_z.sum_of_squares, tokens),
            },
        )

    def derived_logs(self, averages: dict[str, float]) -> dict[str, float]:
        if "log_z_square" in averages:  # not of data without labels, of which lengths alone are logged
            variance = averages.pop("log_z_square") - averages["log_z_mean"] ** 2
            averages["log_z_variance"] = max(variance, 0.0)
        return averages
