"""The objectives `energy` and `residual-nce` of `hf-ebm train`: of a masked language model, of a residual one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils import logging

from hf_ebm.assets import KJV_CAUSAL_LM, KJV_MASKED_LM
from hf_ebm.checks import shown
from hf_ebm.cli.commands import UNKNOWN_HELP, ModelArguments, energy_help, load_model
from hf_ebm.cli.tables import read_records
from hf_ebm.cli.training import begin, check_evaluation, output_checkpoint, run_trainer
from hf_ebm.loading import EMBEDDED, loading
from hf_ebm.models.energy.encoding import encode_plain
from hf_ebm.models.fingerprints import fingerprint
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.candidates import lm_of
from hf_ebm.texts import report_unknown
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig, ResidualNCEConfig, ResidualNCETrainer

logger = logging.get_logger(__name__)


@dataclass
class EnergyArguments:
    """Which model is trained, and on what."""

    train_file: str = field(metadata={"help": "Texts: .jsonl, .parquet, .txt (a text a line)."})
    model_name_or_path: str = field(
        default=EMBEDDED, metadata={"help": "Hub name or folder of a masked language model or a saved EnergyModel."}
    )
    energy: str | None = field(default=None, metadata={"help": energy_help})
    teacher: str | None = field(
        default=None, metadata={"help": "For kl and kl+pll: the masked language model that is projected."}
    )
    eval_file: str | None = field(default=None, metadata={"help": "Such texts for the evaluation."})
    text_column: str = field(default="text", metadata={"help": "Field that holds the text."})
    unknown_tokens: str = field(default="warn", metadata={"help": UNKNOWN_HELP})


def train_energy(which: EnergyArguments, config: EnergyTrainingConfig) -> dict[str, float]:
    """Trains a masked language model as an energy, evaluates if asked to, and saves: what it found."""
    check_evaluation(config, which.eval_file)
    checkpoint = output_checkpoint(config)
    files = {"train_file": which.train_file, "eval_file": which.eval_file}
    texts = {name: _texts(path, which.text_column) for name, path in files.items() if path}
    begin(config)
    model, tokenizer = load_model(_energy_model(which.model_name_or_path, which.energy))
    teacher = None if which.teacher is None else load_model(_energy_model(which.teacher, None))[0]
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
        raise ValueError(_told_of_files(str(error), texts)) from error
    return run_trainer(trainer, checkpoint, config.do_eval)


def _told_of_files(message: str, texts: dict[str, list[str]]) -> str:
    """What a trainer says of a row of its data sets, of the files that they are."""
    found = re.match(r"(train|eval)_dataset: row (\d+)", message)
    if not found:
        return message
    name, row = f"{found[1]}_file", int(found[2])
    return f"{name}: row {row} ({shown(texts[name][row])}){message[found.end() :]}"


def _energy_model(name: str, energy: str | None) -> ModelArguments:
    return ModelArguments(model=name, energy=energy, device="cpu")  # the Trainer moves it


def _texts(path: str, column: str) -> list[str]:
    texts = read_records(path, column).texts(column)
    if not texts:
        raise ValueError(f"{path}: there are no texts")
    return texts


@dataclass
class ResidualArguments:
    """Which models are joined, and what the energy is trained on."""

    train_file: str = field(
        metadata={"help": "Rows of prefix_ids, continuation_ids and negatives, as hf-ebm negatives writes them."}
    )
    lm: str = field(default=EMBEDDED, metadata={"help": "Hub name or folder of the causal language model."})
    encoder: str = field(
        default=EMBEDDED, metadata={"help": "Hub name or folder of the encoder, bidirectional or causal."}
    )
    keep_lm: str = field(default="value", metadata={"help": "Save the language model by value or by reference."})
    eval_file: str | None = field(default=None, metadata={"help": "Such rows for the evaluation."})


def train_residual(which: ResidualArguments, config: ResidualNCEConfig) -> dict[str, float]:
    """Trains a residual energy against continuations of its language model, evaluates if asked to, and saves."""
    check_evaluation(config, which.eval_file)
    checkpoint = output_checkpoint(config)
    rows = {
        name: _residual_rows(path, config)
        for name, path in (("train", which.train_file), ("eval", which.eval_file))
        if path
    }
    begin(config)
    folders = {"lm": KJV_CAUSAL_LM, "encoder": KJV_MASKED_LM}
    lm, encoder = (folders[name] if getattr(which, name) == EMBEDDED else getattr(which, name) for name in folders)
    with loading(f"lm {which.lm!r} or encoder {which.encoder!r}"):
        model = ResidualEnergyModel.from_lm_and_encoder(lm, encoder, keep_lm=which.keep_lm, dtype=torch.float32)
    for path in (which.train_file, which.eval_file):
        if path and not config.online:
            _warn_of_other_noise(path, model)
    trainer = ResidualNCETrainer(
        model, config, train_dataset=rows["train"], eval_dataset=rows.get("eval"), processing_class=model.lm_tokenizer
    )
    return run_trainer(trainer, checkpoint, config.do_eval)


def _residual_rows(path: str, config: ResidualNCEConfig) -> list[dict]:
    """Rows with what the objective reads."""
    columns = ["prefix_ids", "continuation_ids", *([] if config.online else ["negatives"])]
    rows = []
    records = read_records(path, columns[0])
    lacking = [column for column in columns if column not in records.fields]
    if lacking or path.endswith(".txt"):
        raise ValueError(f"{path}: records must have {', '.join(columns)}, as hf-ebm negatives writes them")
    for number, values in enumerate(zip(*map(records.column, columns), strict=True)):
        for column, value in zip(columns, values, strict=True):
            if not value:
                raise ValueError(f"{path}: record {number} must have {column}, a list that isn't empty")
        rows.append(dict(zip(columns, values, strict=True)))
    if not rows:
        raise ValueError(f"{path}: there are no rows")
    return rows


def _warn_of_other_noise(path: str, model: ResidualEnergyModel) -> None:
    """Negatives are to be of the language model that the energy corrects."""
    noted_in = Path(f"{path}.run.json")
    made = json.loads(noted_in.read_text(encoding="utf-8")) if noted_in.exists() else {}
    warps = {name: made[name] for name in ("temperature", "top_k", "top_p") if made.get(name) not in (None, 1.0)}
    if warps:
        logger.warning(f"{path} was sampled with {warps}: its negatives are not of the language model that E corrects")
    noted = made.get("checksums", {}).get("weights")
    if noted is not None and made["dtype"] == "float32" and noted != fingerprint(lm_of(model)):
        logger.warning(
            f"{path} was sampled from {made['model']!r} with other weights than lm: its negatives are not of the "
            "language model that E corrects"
        )
