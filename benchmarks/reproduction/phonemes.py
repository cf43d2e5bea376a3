"""The phoneme row of the thesis' table 6.1: pronunciations of up to six of 39 phonemes, with exact log Z.

The space of 39^6 sequences can't be held, but a BiLSTM's energy is a part read from left to right plus a part read from
right to left (`factored_log_partition`), so all of it is summed over: about five minutes for 32 states a side.
Likelihood is given the length, as a random field has one log Z for each. Training by likelihood would need log Z at
every step.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import set_seed

from benchmarks.reproduction.storage import digest
from hf_ebm import BiLSTMForMaskedLM, BiLSTMMaskedLMConfig, EnergyModel
from hf_ebm.data.cmudict_tasks import load_phonemes
from hf_ebm.data.synthetic import END, FIRST_SYMBOL, MASK, PAD, START
from hf_ebm.models.lstm.modeling_bilstm import factored_log_partition
from hf_ebm.objectives.completions import pad_right
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig


@dataclass(frozen=True)
class PhonemeRunConfig:
    """A training run on phonemes, alike for every objective but the objective."""

    objective: str = "pll"
    max_length: int = 6
    max_steps: int = 600
    batch_size: int = 64
    learning_rate: float = 1e-2
    hidden_size: int = 64
    pseudolikelihood_rows: int = 500
    seed: int = 1


def phoneme_scores(folder: Path, run: PhonemeRunConfig) -> dict[str, float]:
    """Nats a test sequence: `nll` given its length, `pll` of the first rows, `mlm`; and log Z by length."""
    path = folder / f"phonemes-{digest(run)}.json"
    if path.exists():
        return json.loads(path.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    splits = load_phonemes(run.max_length)
    symbols = sorted({symbol for text in splits["train"]["phonemes"] for symbol in text.split()})
    id_of = {symbol: FIRST_SYMBOL + index for index, symbol in enumerate(symbols)}
    rows = {
        split: [{"input_ids": [START, *(id_of[symbol] for symbol in text.split()), END]} for text in part["phonemes"]]
        for split, part in splits.items()
    }
    set_seed(run.seed)
    trainer = _trainer(folder, run, len(symbols), rows["train"])
    trainer.train()
    found = {"trained": time.perf_counter() - started, **_evaluate(trainer, rows["test"], run, len(symbols))}
    shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
    found |= {"seconds": time.perf_counter() - started, **asdict(run)}
    path.write_text(json.dumps(found))
    print(f"  {run}: {found['seconds']:.0f} s", flush=True)
    return found


def _trainer(folder: Path, run: PhonemeRunConfig, symbols: int, rows: list[dict]) -> EnergyTrainer:
    mlm = BiLSTMForMaskedLM(
        BiLSTMMaskedLMConfig(vocab_size=FIRST_SYMBOL + symbols, embedding_dim=32, hidden_size=run.hidden_size)
    )
    model = EnergyModel(
        mlm, energy="raw", mask_token_id=MASK, pad_token_id=PAD, special_token_ids=[PAD, START, END],
        excluded_token_ids=[], prefix_token_ids=[START], suffix_token_ids=[END],
    )  # fmt: skip
    args = EnergyTrainingConfig(
        str(folder / f"phonemes-{digest(run)}.unfinished"), objective=run.objective, max_steps=run.max_steps,
        learning_rate=run.learning_rate, lr_scheduler_type="cosine", seed=run.seed, save_strategy="no",
        per_device_train_batch_size=run.batch_size, per_device_eval_batch_size=64, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_steps=run.max_steps,
    )  # fmt: skip
    return EnergyTrainer(model, args, train_dataset=rows)


@torch.no_grad()
def _evaluate(trainer: EnergyTrainer, rows: list[dict], run: PhonemeRunConfig, symbols: int) -> dict:
    model = trainer.model.eval()
    tokens = torch.arange(FIRST_SYMBOL, FIRST_SYMBOL + symbols)
    lengths = sorted({len(row["input_ids"]) - 2 for row in rows})
    started = time.perf_counter()
    log_z = {length: factored_log_partition(model.mlm, [START], [END], tokens, length) for length in lengths}
    seconds = time.perf_counter() - started
    nll = mlm = 0.0
    for at in range(0, len(rows), 1000):
        part = [torch.tensor(row["input_ids"]) for row in rows[at : at + 1000]]
        ids, mask = pad_right(part, PAD)
        nll += float(model(ids, mask).energy.double().sum()) + sum(log_z[len(row) - 2] for row in part)
        model.config.energy = "local"
        mlm += float(model(ids, mask).energy.double().sum())
        model.config.energy = "raw"
    trainer.args.objective = "pll"
    pll = trainer.evaluate(rows[: run.pseudolikelihood_rows])["eval_loss"]
    return {
        "nll": nll / len(rows), "mlm": mlm / len(rows), "pll": pll, "log_z": log_z, "log_z_seconds": seconds,
        "test_rows": len(rows),
    }  # fmt: skip
