"""`hf-ebm train OBJECTIVE`: train a sequence model with one of the objectives of `hf_ebm.trainers`.

All arguments of Transformers' `Seq2SeqTrainingArguments` are options. The folder `--output_dir` gets the model, its
tokenizer, the state of the trainer and the metrics, which are printed too, as one line of JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import DatasetDict
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
)

from hf_ebm.cli import help
from hf_ebm.cli.commands import parse
from hf_ebm.cli.training import begin, output_checkpoint, print_metrics, run_trainer
from hf_ebm.cli.training.data import DataArguments, first_rows, load_pairs
from hf_ebm.cli.training.energies import EnergyArguments, ResidualArguments, train_energy, train_residual
from hf_ebm.cli.training.models import (
    FRESH,
    LOWER_IS_BETTER,
    GenerationMetrics,
    ScorerArguments,
    TrainedModelArguments,
    check_fresh_checkpoint,
    check_ids,
    check_lengths,
    check_targets,
    end_token,
    fresh_model,
    fresh_settings,
    longest_decoded,
    max_positions,
    metric_names,
    padding_tokenizer,
    pretrained,
    scorer_cost,
)
from hf_ebm.data.symbols import encode_completions, encode_pairs, symbol_tokenizer
from hf_ebm.loading import first_line
from hf_ebm.objectives.sequence_costs import COSTS
from hf_ebm.trainers import (
    CrossEntropyConfig,
    CrossEntropyTrainer,
    EnergyTrainingConfig,
    GRPOConfig,
    GRPOTrainer,
    MGSConfig,
    MGSTrainer,
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
    RankingConfig,
    RankingTrainer,
    ResidualNCEConfig,
    ScheduledSamplingConfig,
    ScheduledSamplingTrainer,
    SelfNormalizedConfig,
    SelfNormalizedTrainer,
    SoftBeamConfig,
    SoftBeamTrainer,
)
from hf_ebm.trainers.objective import ObjectiveTrainer
from hf_ebm.trainers.prompts import PromptCollator
from hf_ebm.trainers.reward_functions import NEGATIVE
from hf_ebm.trainers.seq2seq import GenerationTrainingConfig
from hf_ebm.trainers.targets import new_token_limit
from hf_ebm.trainers.task_loss import TaskLossConfig, TaskLossTrainer

OBJECTIVES = {
    "cross-entropy": (CrossEntropyConfig, CrossEntropyTrainer, "teacher forcing, the baseline of the others"),
    "scheduled-sampling": (
        ScheduledSamplingConfig,
        ScheduledSamplingTrainer,
        "inputs of the model's own, hard or soft",
    ),
    "self-normalized": (SelfNormalizedConfig, SelfNormalizedTrainer, "cross entropy and squared local log normalizers"),
    "soft-beam": (SoftBeamConfig, SoftBeamTrainer, "what beam search finds, through its continuous relaxation"),
    "mgs": (MGSConfig, MGSTrainer, "a cost of what is decoded, by search for a direction of the weights"),
    "minimum-risk": (MinimumRiskConfig, MinimumRiskTrainer, "the expected cost of sampled sequences"),
    "policy-gradient": (PolicyGradientConfig, PolicyGradientTrainer, "the expected cost, by REINFORCE with a baseline"),
    "grpo": (GRPOConfig, GRPOTrainer, "the expected cost, by advantages in a group of samples: GRPO, Dr. GRPO"),
    "ranking": (RankingConfig, RankingTrainer, "candidates in the order of their costs: BRIO, SLiC-HF"),
}
# Objectives of energies, which read other options.
OF_ENERGIES: dict[str, tuple[type, type, Callable[..., dict[str, float]], str]] = {
    "residual-nce": (
        ResidualArguments,
        ResidualNCEConfig,
        train_residual,
        "the energy of a residual model, by telling real continuations from sampled ones",
    ),
    "energy": (
        EnergyArguments,
        EnergyTrainingConfig,
        train_energy,
        "a masked language model as an energy: --objective mle, pll, mlm, kl or kl+pll",
    ),
}


def descriptions() -> dict[str, str]:
    """What each objective is."""
    own = {
        name: description + (" (of causal models, too)" if issubclass(config_class, TaskLossConfig) else "")
        for name, (config_class, _, description) in OBJECTIVES.items()
    }
    return own | {name: description for name, (*_, description) in OF_ENERGIES.items()}


def train(argv: list[str]) -> None:
    """Trains, evaluates if asked to, and saves."""
    if help.asked("train", argv):
        print(help.help_of_train(descriptions()), end="")
        return
    if argv[0] in OF_ENERGIES:
        options, config_class, train_it, description = OF_ENERGIES[argv[0]]
        of_energy, config = parse([options, config_class], argv[1:], f"train {argv[0]}", description)
        print_metrics(config, lambda: train_it(of_energy, config))
        return
    if argv[0] not in OBJECTIVES:
        known = ", ".join([*OBJECTIVES, *OF_ENERGIES])
        raise ValueError(f"objective must be one of {known}, and come first, got {argv[0]!r}")
    config_class, trainer_class, description = OBJECTIVES[argv[0]]
    arguments = [TrainedModelArguments, DataArguments, config_class]
    about = f"{description}. Evaluation generates up to the length of the longest target, if not told another length."
    if issubclass(config_class, TaskLossConfig):
        arguments.append(ScorerArguments)
        about = (
            f"{description}; --cost is one of {', '.join(COSTS)}. --reward_funcs are rewards in its place: one of "
            f"these after {NEGATIVE}, a metric of evaluate, or a reward model. Of a causal model sources are the "
            "prompts that targets continue; where nothing reads targets, the data need none. Decoding ends at "
            "max_length_ratio times the longest target of a batch, and before where the generation_config (of the "
            "model, or given) has a max_new_tokens or max_length."
        )
    which, data, config, *scorer = parse(arguments, argv[1:], f"train {argv[0]}", about)
    scorer_model = scorer[0].scorer_model if scorer else None
    print_metrics(config, lambda: _train(which, data, config, trainer_class, scorer_model))


def _train(
    which: TrainedModelArguments,
    data: DataArguments,
    config: GenerationTrainingConfig,
    trainer_class: type[ObjectiveTrainer],
    scorer_model: str | None,
) -> dict[str, float]:
    evaluate = config.do_eval  # the Trainer sets it with eval_strategy
    _check(config, trainer_class, data.task, evaluate, scorer_model)
    decoding = _generation_config(config)
    checkpoint = output_checkpoint(config)
    settings = fresh_settings(which, data.task)
    begin(config)
    for_cost = config if isinstance(config, TaskLossConfig) else None
    model, tokenizer, pairs = _load(which, data, settings, evaluate, for_cost is not None, checkpoint)
    padding, end_id, cost = tokenizer, None, None
    if for_cost is not None:
        if scorer_model is not None:
            cost = scorer_cost(scorer_model, model, tokenizer, for_cost)
        if issubclass(trainer_class, TaskLossTrainer) and "target" not in pairs["train"].column_names:
            of_prompts = _trainer_of_prompts(model, tokenizer, pairs, data, for_cost, trainer_class, cost)
            return run_trainer(of_prompts, checkpoint, evaluate)
        check_targets(for_cost, pairs)
        end_id = end_token(decoding or model.generation_config, model, tokenizer)
        padding = padding_tokenizer(tokenizer, end_id)
    limits = data.max_source_length, data.max_target_length
    if end_id is None or model.config.is_encoder_decoder:
        encoded = encode_pairs(pairs, tokenizer, *limits)
    else:
        encoded = encode_completions(pairs, tokenizer, end_id, *limits, max_positions(model, tokenizer))
    check_ids(model, encoded, padding)
    _check_aligned(model, encoded)
    if for_cost is not None:
        check_lengths(for_cost, decoding or model.generation_config, model, encoded, cost)
        longest = longest_decoded(for_cost, decoding or model.generation_config, encoded, 1)
    else:
        longest = max(len(labels) for split in encoded.values() for labels in split["labels"])
        # One more, for the start token, where Transformers would stop after 20 tokens.
        if decoding is None or new_token_limit(decoding, 1) is None:
            config.generation_max_length = config.generation_max_length or longest + 1
    if which.model_name_or_path == FRESH and model.config.attention != "fixed":  # which ends with the source
        model.generation_config.max_length = longest + 1
    compute_metrics = None
    if config.predict_with_generate:
        compute_metrics = GenerationMetrics(data.task, padding, pairs["evaluation"], encoded["evaluation"])
        config.include_for_metrics = ["inputs"]
    on_cost: dict[str, Any] = {} if for_cost is None else {"cost": cost}
    trainer = trainer_class(
        model, config, train_dataset=encoded["train"], eval_dataset=encoded.get("evaluation"),
        data_collator=DataCollatorForSeq2Seq(padding), processing_class=tokenizer, compute_metrics=compute_metrics,
        **on_cost,
    )  # fmt: skip
    return run_trainer(trainer, checkpoint, evaluate)


def _load(
    which: TrainedModelArguments,
    data: DataArguments,
    settings: dict,
    evaluate: bool,
    for_cost: bool,
    checkpoint: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DatasetDict]:
    """The model, its tokenizer and the texts."""
    if which.model_name_or_path != FRESH:
        model, tokenizer = pretrained(which.model_name_or_path, "model_name_or_path", causal=for_cost)
        return model, tokenizer, first_rows(load_pairs(data, evaluate, sources_alone=for_cost), data)
    pairs = load_pairs(data, evaluate)
    # From all rows, so that the symbols don't depend on how many are used.
    tokenizer = symbol_tokenizer(pairs["train"]["target"], pairs["train"]["source"])
    model = fresh_model(settings, tokenizer)
    check_fresh_checkpoint(checkpoint, model, tokenizer)
    return model, tokenizer, first_rows(pairs, data)


def _trainer_of_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: DatasetDict,
    data: DataArguments,
    config: TaskLossConfig,
    trainer_class: type[TaskLossTrainer],
    cost: Any,
) -> TaskLossTrainer:
    """The trainer of sources without targets. Raises `ValueError` for what needs targets, and sources too long."""
    without = f"{data.task} has no column {data.target_column!r}"
    if config.predict_with_generate:
        raise ValueError(f"predict_with_generate scores outputs by targets, but {without}")
    config.prompt_column = "source"
    trainer = trainer_class(
        model, config, train_dataset=prompts["train"], eval_dataset=prompts.get("evaluation"), cost=cost,
        processing_class=tokenizer,
    )  # fmt: skip
    if trainer.needs_targets:
        raise ValueError(f"{without}, which the objective, its cost or a reward reads")
    collator = trainer.data_collator
    assert isinstance(collator, PromptCollator)
    for split, rows in prompts.items():
        for row, length in enumerate(collator.lengths(rows)):
            if data.max_source_length is not None and length > data.max_source_length:
                raise ValueError(
                    f"source of row {row} of split {split!r} has {length} tokens, more than the "
                    f"{data.max_source_length} allowed"
                )
    return trainer


def _check(
    config: GenerationTrainingConfig,
    trainer_class: type[ObjectiveTrainer],
    task: str,
    evaluate: bool,
    scorer_model: str | None,
) -> None:
    """Refuses what the Trainer would find out after training, or never."""
    cost = config.cost if isinstance(config, TaskLossConfig) else TaskLossConfig.cost
    rewards = config.reward_funcs if isinstance(config, TaskLossConfig) else None
    for name, other in (("cost", None if cost == TaskLossConfig.cost else cost), ("reward_funcs", rewards)):
        if scorer_model is not None and other is not None:
            raise ValueError(f"scorer_model and {name} must not both be given, got {scorer_model!r} and {other!r}")
    if config.do_predict:
        raise ValueError("do_predict is no option here; evaluate on another split with eval_split or eval_file")
    if config.predict_with_generate and not evaluate:
        raise ValueError(
            "predict_with_generate was given without an evaluation; add --do_eval (at the end) or --eval_strategy"
        )
    if config.metric_for_best_model is None:
        return
    generated, name = metric_names(task), config.metric_for_best_model.removeprefix("eval_")
    logged = trainer_class.derived_logs(dict.fromkeys(trainer_class.evaluated_terms, 0.0))
    known = ("loss", *logged, *(() if rewards is None else ("reward",)), *generated)
    if name not in known:
        raise ValueError(
            f"metric_for_best_model must be one of {', '.join(known)}, got {config.metric_for_best_model!r}"
        )
    if name in generated and not config.predict_with_generate:
        raise ValueError(f"metric_for_best_model {name!r} is of generated outputs; add --predict_with_generate")
    if name in LOWER_IS_BETTER:
        config.greater_is_better = False


def _generation_config(config: GenerationTrainingConfig) -> GenerationConfig | None:
    """What `--generation_config` names, in its place from now on."""
    if config.generation_config is None:
        return None
    name = str(config.generation_config)  # a Hub name as well has been made a path
    try:
        config.generation_config = Seq2SeqTrainer.load_generation_config(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"generation_config: {name!r} cannot be loaded: {first_line(error)}") from error
    return config.generation_config


def _check_aligned(model: PreTrainedModel, encoded: DatasetDict) -> None:
    """With fixed attention the model writes one symbol a source position, and says no more than a batch's row."""
    if getattr(model.config, "attention", None) != "fixed":
        return
    for split, rows in encoded.items():
        for number, row in enumerate(rows):
            sizes = len(row["input_ids"]), len(row["labels"])
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"row {number} of split {split!r} has {sizes[0] - 1} source and {sizes[1] - 1} target symbols; "
                    "attention 'fixed' needs equally many"
                )
