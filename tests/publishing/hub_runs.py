"""Runs that need a Hub, for `test_hub`: forks of a process that has imported PyTorch and Transformers, and not hf_ebm.

    python -S hub_runs.py FOLDER   (with the variables of the Hub and the site packages as the path)

Each fork begins as a new process does, in a folder of its own, with what it writes in `stdout` and `stderr` there; only
`pushed`, `installed` and `documented` find this project.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertForMaskedLM,  # noqa: F401
    GenerationMixin,
    PreTrainedTokenizerFast,  # noqa: F401
)

ROOT = Path(__file__).parents[2]


def with_the_project(module: str, *arguments: str) -> None:
    """`main` of a module of the tests, where the project is found."""
    sys.path.insert(0, str(ROOT))
    import_module(f"tests.{module}").main(*arguments)


def loaded_trusted(found: str) -> None:
    import load_run  # it lies beside this file

    load_run.main(found, "trusted")


def generated(folder: str, *repositories: str) -> None:
    """Samples by `custom_generate` of a BERT and of a BART, and what is told without a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bert = AutoModelForMaskedLM.from_pretrained(folder)
    prompt = tokenizer("the [MASK] sat on the [MASK]", return_tensors="pt")
    settings = dict(tokenizer=tokenizer, num_chains=2, num_epochs=3, seed=0)
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=3,
    )  # fmt: skip
    bart = BartForConditionalGeneration(config).eval()
    for repository in repositories:
        generate = GenerationMixin.load_custom_generate(None, repository, trust_remote_code=True)
        out = generate(bert, input_ids=prompt.input_ids, attention_mask=prompt.attention_mask, **settings)
        print("BERT", out.sequences.tolist())
        out = bart.generate(prompt.input_ids, custom_generate=repository, trust_remote_code=True, lengths=4, **settings)
        print("BART", tuple(out.sequences.shape), out.energies.shape[1])
        try:
            generate(bert, input_ids=prompt.input_ids)
        except ValueError as error:
            print("ERROR", error)


def _inside(folder: Path, run: Callable, arguments: tuple) -> None:
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    torch.set_num_threads(1)  # makes the pool of threads again before several load weights at once
    run(*arguments)


def main(folder: str) -> None:
    """Runs that fail leave the others theirs: what each wrote, and its status in `status`."""
    torch.set_num_threads(1)
    assert find_spec("hf_ebm") is None
    gc.freeze()  # every training begins with a collection, which what is imported makes a long one
    root = Path(folder)
    found = str(root / "pushed" / "found.json")
    runs = {
        "pushed": (with_the_project, "publishing.push_run", str(root / "pushed")),
        "installed": (with_the_project, "publishing.load_run", found, "installed"),
        "trusted": (loaded_trusted, found),
        "generated": (generated, str(root / "model"), str(root / "sampler"), "tester/sampler"),
        "documented": (with_the_project, "docs.run_blocks", str(root / "blocks.json")),
    }
    for name, (run, *arguments) in runs.items():
        (root / name).mkdir()
        process = multiprocessing.get_context("fork").Process(target=_inside, args=(root / name, run, arguments))
        process.start()
        process.join()
        (root / name / "status").write_text(str(process.exitcode))


if __name__ == "__main__":
    main(*sys.argv[1:])
