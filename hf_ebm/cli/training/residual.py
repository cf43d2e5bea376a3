"""`hf-ebm train residual-nce`: a residual energy model, against continuations of its language model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils import logging

from hf_ebm.assets import KJV_CAUSAL_LM, KJV_MASKED_LM
from hf_ebm.cli.options import parse
from hf_ebm.cli.tables import read_records
from hf_ebm.cli.training.run import begin, check_evaluation, output_checkpoint, print_metrics, run_trainer
from hf_ebm.loading import EMBEDDED, loading
from hf_ebm.models.fingerprints import fingerprint
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.inputs_residual import lm_of
from hf_ebm.trainers import ResidualNCEConfig, ResidualNCETrainer

DESCRIPTION = "the energy of a residual model, by telling real continuations from sampled ones"

logger = logging.get_logger(__name__)


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


def run(argv: list[str]) -> None:
    """Trains, evaluates if asked to, and saves."""
    which, config = parse([ResidualArguments, ResidualNCEConfig], argv, "train residual-nce", DESCRIPTION)
    print_metrics(config, lambda: _train(which, config))


def _train(which: ResidualArguments, config: ResidualNCEConfig) -> dict[str, float]:
    check_evaluation(config, which.eval_file)
    checkpoint = output_checkpoint(config)
    rows = {
        name: _rows(path, config) for name, path in (("train", which.train_file), ("eval", which.eval_file)) if path
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


def _rows(path: str, config: ResidualNCEConfig) -> list[dict]:
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
