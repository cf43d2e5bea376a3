"""`hf-ebm negatives`, `hf-ebm perplexity` and `hf-ebm rerank` with language models and residual models."""

import json
import math

import datasets
import pandas as pd
import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from hf_ebm import EnergyModel
from hf_ebm.cli import continuations as continuations_commands
from hf_ebm.models.autoregressive_product import ProductLM
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.scoring_residual import residual_perplexity
from hf_ebm.trainers import ResidualNCEConfig, ResidualNCETrainer
from tests.cli.conftest import killed, read, run
from tests.models.residual_models import spread, toy_encoder
from tests.models.tokenizers_for_tests import small_model, small_tokenizer

pytestmark = pytest.mark.slow

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "the",
    "dog",
    "sat",
    "on",
    "the",
    "log",
    "in",
    "the",
    "beginning",
]
TEXTS = [" ".join(WORDS[start % 9 : start % 9 + 4 + start % 5]) for start in range(30)]
SIZES = ["--prefix_tokens", "3", "--max_new_tokens", "4"]


def language_model(tokenizer, seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=24, n_embd=16, n_layer=1, n_head=2, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id,
    )  # fmt: skip
    return spread(GPT2LMHeadModel(config), 0.3).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Texts, a language model, a residual model and a product of language models."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), small_tokenizer("wordpiece")
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    lm = language_model(tokenizer)
    lm.save_pretrained(folder / "lm")
    tokenizer.save_pretrained(folder / "lm")
    encoder = toy_encoder("bert", len(tokenizer), torch.float32)
    encoder.save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    model = ResidualEnergyModel(lm, encoder, lm_tokenizer=tokenizer, encoder_tokenizer=tokenizer)
    model.head.weight.data.normal_()
    model.save_pretrained(folder / "residual")
    ProductLM(lm, language_model(tokenizer, 1)).save_pretrained(folder / "product")
    tokenizer.save_pretrained(folder / "product")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertLMHeadModel(config).save_pretrained(folder / "mlm")
    state = {name: value for name, value in lm.state_dict().items() if "mlp.c_fc" not in name}
    lm.save_pretrained(folder / "torn", state_dict=state)
    small_model(tokenizer).mlm.save_pretrained(folder / "masked")
    for name in ("mlm", "torn", "masked"):
        tokenizer.save_pretrained(folder / name)
    return folder


def negatives(folders, output, *more) -> list:
    return ["negatives", "--model", folders / "lm", "--input", folders / "texts.txt", "--output", output, *SIZES,
            "--num_negatives", "3", "--texts_at_once", "8", "--seed", "4", *more]  # fmt: skip


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out.jsonl"
    run(*negatives(folders, output))
    return sorted(read(output), key=lambda record: record["row"])


def test_records_are_what_the_trainer_reads(folders, whole, tmp_path, capsys):
    tokenizer = small_tokenizer("wordpiece")
    assert [record["row"] for record in whole] == list(range(30))
    for record, text in zip(whole, TEXTS, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert record["text"] == text and record["prefix_ids"] == ids[:3]
        assert record["continuation_ids"] == ids[3:7]
        assert len(record["negatives"]) == 3
        for own in record["negatives"]:
            assert 1 <= len(own) <= 4 and tokenizer.sep_token_id not in own[:-1]
            assert len(own) == 4 or own[-1] == tokenizer.sep_token_id
    run(*negatives(folders, tmp_path / "out.jsonl"))
    noted = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert (noted["temperature"], noted["top_k"], noted["top_p"], noted["seed"]) == (1.0, None, None, 4)
    rows = datasets.load_dataset("json", data_files=str(tmp_path / "out.jsonl"), split="train", cache_dir=str(tmp_path))
    model = ResidualEnergyModel.from_pretrained(folders / "residual")
    config = ResidualNCEConfig(str(tmp_path / "o"), max_steps=2, report_to=[], use_cpu=True, max_new_tokens=4)
    assert ResidualNCETrainer(model, config, train_dataset=rows).train().global_step == 2


def test_a_half_written_output_is_completed_and_another_is_refused(folders, whole, tmp_path):
    output = tmp_path / "out.jsonl"
    run(*negatives(folders, output))
    content = output.read_bytes()
    for cut in (0, len(content) // 3, len(content) - 1):
        output.write_bytes(content[:cut])
        run(*negatives(folders, output))
        assert sorted(read(output), key=lambda record: record["row"]) == whole
    with pytest.raises(SystemExit):
        run(*negatives(folders, output, "--top_k", "5"))
    assert sorted(read(output), key=lambda record: record["row"]) == whole


def test_other_texts_under_the_same_name_are_another_run(folders, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    arguments = [texts if argument == folders / "texts.txt" else argument
                 for argument in negatives(folders, tmp_path / "out.jsonl")]  # fmt: skip
    run(*arguments)
    texts.write_text("\n".join(reversed(TEXTS)) + "\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        run(*arguments)


def test_a_killed_run_goes_on_in_parquet(folders, whole, tmp_path):
    output = tmp_path / "out.parquet"
    arguments = list(map(str, negatives(folders, output)))
    killed(continuations_commands, "sample_continuations", 3, lambda *_: None, *arguments)
    assert len(read(tmp_path / "out.parquet.partial.jsonl")) == 16
    run(*arguments)
    found = pd.read_parquet(output)
    assert found["row"].tolist() == list(range(30))
    assert [[ids.tolist() for ids in own] for own in found["negatives"]] == [record["negatives"] for record in whole]


def test_perplexity_of_a_residual_model_is_the_librarys(folders, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    arguments = [
        "--input",
        folders / "texts.txt",
        *SIZES,
        "--num_samples",
        "20",
        "50",
        "--max_rows",
        "6",
        "--seed",
        "2",
    ]
    run("perplexity", "--model", folders / "residual", *arguments, "--output", output)
    printed, rows = json.loads(capsys.readouterr().out), read(output)
    model = ResidualEnergyModel.from_pretrained(folders / "residual").eval()
    expected = residual_perplexity(
        model, [row["prefix_ids"] for row in rows], [row["continuation_ids"] for row in rows], max_new_tokens=4,
        num_samples=[20, 50], seed=2,
    )  # fmt: skip
    assert [entry["num_samples"] for entry in printed["perplexity"]] == [20, 50]
    assert printed["sampling_error"] == pytest.approx(expected.sampling_error, rel=1e-5)
    for name in ("lower", "upper"):
        found = [entry[name] for entry in printed["perplexity"]]
        assert found == pytest.approx(getattr(expected, name).tolist(), rel=1e-6)
    assert [row["energy"] for row in rows] == pytest.approx(expected.energy.tolist(), rel=1e-5)
    run("perplexity", "--model", folders / "lm", *arguments[:-4], "--max_rows", "6")
    base = json.loads(capsys.readouterr().out)
    assert base["perplexity"] == pytest.approx(printed["base_perplexity"], rel=1e-5)
    assert base["tokens"] == printed["tokens"] == int(expected.num_tokens.sum())


def test_perplexity_of_a_product_is_that_of_its_renormalized_tokens(folders, capsys):
    run("perplexity", "--model", folders / "product", "--input", folders / "texts.txt", *SIZES, "--max_rows", "2")
    printed = json.loads(capsys.readouterr().out)
    tokenizer, total, count = small_tokenizer("wordpiece"), 0.0, 0
    parts = [language_model(tokenizer, seed) for seed in (0, 1)]
    for text in TEXTS[:2]:
        ids = tokenizer(text)["input_ids"][:7]
        for t in range(3, len(ids)):
            with torch.no_grad():
                logits = sum(part(input_ids=torch.tensor([ids[:t]])).logits[0, -1] for part in parts)
            total, count = total - float(logits.log_softmax(-1)[ids[t]]), count + 1
    assert printed["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_perplexity_of_a_masked_model_is_the_librarys(folders, tmp_path, capsys):
    # The last is of as many tokens as the first, in a context of its own.
    texts = ["the cat sat", "the the", "dog \u4e00", "sat cat on", "the [SEP] cat sat"]
    kept = [text for text in texts if text != texts[2]]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text, "id": 7}) + "\n" for text in texts))
    arguments = ["--model", folders / "masked", "--input", tmp_path / "in.jsonl", "--unknown_tokens", "ignore"]
    few = {"num_particles": 4, "num_runs": 2, "num_chains": 2, "num_epochs": 2}
    options = [str(part) for name, value in few.items() for part in (f"--{name}", value)]
    with pytest.raises(SystemExit):
        run("perplexity", *arguments, *options)
    assert "in.jsonl: record 2 holds" in capsys.readouterr().err
    run("perplexity", *arguments, *options, "--skip_unusable_rows", "true", "--output", tmp_path / "out.jsonl")
    printed, rows = json.loads(capsys.readouterr().out), read(tmp_path / "out.jsonl")
    model, tokenizer = EnergyModel.from_pretrained(folders / "masked").eval(), small_tokenizer("wordpiece")
    expected = model.perplexity(kept, tokenizer, **few)
    assert printed["perplexity"] == pytest.approx({"lower": expected.lower, "upper": expected.upper}, rel=1e-5)
    assert printed["sampling_error"]["lower"] == pytest.approx(expected.lower_sampling_error, rel=1e-4)
    assert (printed["texts"], printed["rows"], printed["tokens"]) == (5, 4, int(expected.num_tokens.sum()))
    assert [(row["text"], row["id"]) for row in rows] == [(text, 7) for text in kept]
    sums = sorted(zip(torch.bincount(expected.frame).tolist(), expected.log_partition.tolist(), strict=True))
    assert sorted((own["texts"], own["lower"]) for own in printed["log_partition"]) == [
        (count, pytest.approx(value, rel=1e-5)) for count, value in sums
    ]
    found = torch.tensor([-row["energy"] - row["log_partition_lower"] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected.log_probs, atol=1e-4, rtol=1e-4)


def test_rerank_with_a_residual_model(folders, tmp_path):
    records = [{"candidates": ["the cat sat", "mat mat"], "before": "and"}, {"candidates": ["dog"], "before": "on the"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--prefix_column", "before"]
    run("rerank", "--model", folders / "residual", *arguments)
    model = ResidualEnergyModel.from_pretrained(folders / "residual").eval()
    expected = model.rerank(
        [record["candidates"] for record in records], small_tokenizer("wordpiece"), prefixes=["and", "and", "on the"]
    )
    for row, record in enumerate(read(tmp_path / "out.jsonl")):
        assert record["order"] == expected.order[row]
        assert record["energies"] == pytest.approx(expected.energies[row], rel=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["perplexity", "--num_samples", "1"], "num_samples must be 2 or more"),
        (["perplexity", "--prefix_tokens", "0"], "prefix_tokens must be a whole number from 1 up, got 0"),
        (
            ["perplexity", "--prefix_tokens", "20", "--max_new_tokens", "4"],
            "none of 30 texts has a continuation behind",
        ),
        (["perplexity", "--prefix_tokens", "50"], "must be at most 24 together"),
        (["perplexity", "--input", "{tmp}/empty.txt", *SIZES], "none of 0 texts has a continuation"),
        (["perplexity", "--model", "{models}/mlm"], "sees the tokens after"),
        (["perplexity", "--model", "{models}/torn"], "has no weights for"),
        (["perplexity", "--num_runs", "3"], "num_runs: of masked language models"),
        (
            ["perplexity", "--model", "{models}/masked", "--num_samples", "7"],
            "num_samples: of causal and residual models",
        ),
        (["perplexity", "--model", "{models}/masked", "--prefix_tokens", "3"], "prefix_tokens: of causal"),
        (["negatives", "--output", "{tmp}/o.csv"], "must end in .jsonl, .ndjson, .json or .parquet"),
        (["negatives", "--output", "-"], "output must be a file"),
        (
            ["negatives", "--output", "{tmp}/o.jsonl", "--top_p", "2"],
            "top_p must be a number above 0 and up to 1, got 2.0",
        ),
        (
            ["negatives", "--output", "{tmp}/o.jsonl", "--temperature", "0"],
            "temperature must be a number from 0.000001 up, got 0.0",
        ),
        (["negatives", "--output", "{tmp}/o.jsonl", "--num_negatives", "0"], "num_negatives must be 1 or more, got 0"),
        (
            ["negatives", "--output", "{tmp}/o.jsonl", "--prefix_tokens", "3", "--max_new_tokens", "30"],
            "must be at most 24 together",
        ),
        (["negatives", "--output", "{tmp}/o.jsonl", "--model", "{models}/residual"], "is a residual model"),
        (["negatives", "--output", "{tmp}/o.jsonl", "--model", "{tmp}"], "cannot be loaded"),
    ],
)
def test_mistakes_are_reported_in_a_line(folders, tmp_path, capsys, arguments, message):
    arguments = [argument.format(tmp=tmp_path, models=folders) for argument in arguments]
    defaults = [] if "--model" in arguments else ["--model", folders / "lm"]
    sizes = [] if "--prefix_tokens" in arguments or "--max_new_tokens" in arguments else SIZES
    (tmp_path / "empty.txt").write_text("")
    source = [] if "--input" in arguments else ["--input", folders / "texts.txt"]
    with pytest.raises(SystemExit):
        run(*arguments, *defaults, *sizes, *source)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_residual_model_is_trained_and_read_again(folders, tmp_path, capsys):
    run(*negatives(folders, tmp_path / "rows.jsonl"))
    capsys.readouterr()
    arguments = ["--lm", folders / "lm", "--encoder", folders / "encoder", "--keep_lm", "reference", "--train_file",
                 tmp_path / "rows.jsonl", "--eval_file", tmp_path / "rows.jsonl", "--do_eval", "--max_new_tokens", "4",
                 "--max_steps", "3", "--report_to", "none", "--use_cpu"]  # fmt: skip
    run("train", "residual-nce", *arguments, "--output_dir", tmp_path / "out")
    metrics = json.loads(capsys.readouterr().out)
    assert {"train_loss", "eval_loss", "eval_accuracy_real", "eval_log_self_normalizer"} <= set(metrics)
    model = ResidualEnergyModel.from_pretrained(tmp_path / "out")
    assert model.config.lm_reference == str(folders / "lm")
    run("perplexity", "--model", tmp_path / "out", "--input", folders / "texts.txt", *SIZES, "--num_samples", "8")
    assert json.loads(capsys.readouterr().out)["rows"] == 30
    with pytest.raises(SystemExit):  # the folder isn't empty
        run("train", "residual-nce", *arguments, "--output_dir", tmp_path / "out")
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "bare.jsonl").write_text('{"prefix_ids": [2], "continuation_ids": [3]}\n')
    arguments[arguments.index("--train_file") + 1] = tmp_path / "bare.jsonl"
    with pytest.raises(SystemExit):
        run("train", "residual-nce", *arguments, "--output_dir", tmp_path / "other")
    assert "bare.jsonl: records must have prefix_ids, continuation_ids, negatives" in capsys.readouterr().err
