"""`hf-ebm train energy`: a masked language model as an energy, by likelihood, pseudolikelihood or projection."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hf_ebm.checks import shown
from hf_ebm.cli.common import ENERGY_HELP, UNKNOWN_HELP, ModelArguments, load_model
from hf_ebm.cli.options import parse
from hf_ebm.cli.tables import read_records
from hf_ebm.cli.training.run import begin, check_evaluation, output_checkpoint, print_metrics, run_trainer
from hf_ebm.loading import EMBEDDED
from hf_ebm.models.energy.encoding import encode_plain
from hf_ebm.texts import report_unknown
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig

DESCRIPTION = "a masked language model as an energy: --objective mle, pll, mlm, kl or kl+pll"


@dataclass
class EnergyArguments:
    """Which model is trained, and on what."""

    train_file: str = field(metadata={"help": "Texts: .jsonl, .parquet, .txt (a text a line)."})
    model_name_or_path: str = field(
        default=EMBEDDED, metadata={"help": "Hub name or folder of a masked language model or a saved EnergyModel."}
    )
    energy: str | None = field(default=None, metadata={"help": ENERGY_HELP})
    teacher: str | None = field(
        default=None, metadata={"help": "For kl and kl+pll: the masked language model that is projected."}
    )
    eval_file: str | None = field(default=None, metadata={"help": "Such texts for the evaluation."})
    text_column: str = field(default="text", metadata={"help": "Field that holds the text."})
    unknown_tokens: str = field(default="warn", metadata={"help": UNKNOWN_HELP})


def run(argv: list[str]) -> None:
    """Trains, evaluates if asked to, and saves."""
    which, config = parse([EnergyArguments, EnergyTrainingConfig], argv, "train energy", DESCRIPTION)
    print_metrics(config, lambda: _train(which, config))


def _train(which: EnergyArguments, config: EnergyTrainingConfig) -> dict[str, float]:
    check_evaluation(config, which.eval_file)
    checkpoint = output_checkpoint(config)
    files = {"train_file": which.train_file, "eval_file": which.eval_file}
    texts = {name: _texts(path, which.text_column) for name, path in files.items() if path}
    begin(config)
    model, tokenizer = load_model(_arguments(which.model_name_or_path, which.energy))
    teacher = None if which.teacher is None else load_model(_arguments(which.teacher, None))[0]
    rows = {
        name: [{"input_ids": ids} for ids in encode_plain(model, tokenizer, name, own)] for name, own in texts.items()
    }
    if config.process_index == 0 or which.unknown_tokens == "error":
        for name, own in texts.items():
            report_unknown(tokenizer, name, own, which.unknown_tokens)
    try:
        trainer = EnergyTrainer(
            model, config, teacher=teacher, train_dataset=rows["train_file"], eval_dataset=rows.get("eval_file"),
            processing_class=tokenizer,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(_of_files(str(error), texts)) from error
    return run_trainer(trainer, checkpoint, config.do_eval)


def _of_files(message: str, texts: dict[str, list[str]]) -> str:
    """What a trainer says of a row of its data sets, of the files that they are."""
    found = re.match(r"(train|eval)_dataset: row (\d+)", message)
    if not found:
        return message
    name, row = f"{found[1]}_file", int(found[2])
    return f"{name}: row {row} ({shown(texts[name][row])}){message[found.end() :]}"


def _arguments(name: str, energy: str | None) -> ModelArguments:
    return ModelArguments(model=name, energy=energy, device="cpu")  # the Trainer moves it


def _texts(path: str, column: str) -> list[str]:
    texts = read_records(path, column).texts(column)
    if not texts:
        raise ValueError(f"{path}: there are no texts")
    return texts
