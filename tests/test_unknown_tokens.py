"""What a tokenizer has no token for: counted, told once, or refused, wherever texts come in."""

import json

import pytest
import torch
from transformers import EsmConfig, EsmForMaskedLM, EsmTokenizer, pipeline

import hf_ebm.pipelines  # noqa: F401  # registers the tasks
from hf_ebm import EnergyModel
from hf_ebm.cli.main import main
from hf_ebm.demo.scoring import score_lines
from hf_ebm.evaluate_modules import score
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.texts import report_unknown, unknown_of
from tests.models.tokenizers_for_tests import small_tokenizer
from tests.pipelines.models_for_pipelines import energy_model, residual_model, tokenizer

# 犬 and ☃ stand in no line that the tokenizer was trained on.
STRANGE = ["the cat", "the 犬 sat", "☃", "god"]


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr("hf_ebm.texts.logger.warning", found.append)
    return found


@pytest.fixture
def esm(tmp_path):
    letters = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWC", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(letters))
    return EsmTokenizer(str(tmp_path / "vocab.txt"))


def test_protein_in_small_letters(esm, warnings):
    torch.manual_seed(0)
    config = EsmConfig(
        vocab_size=len(esm), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        pad_token_id=1, mask_token_id=esm.mask_token_id, position_embedding_type="rotary", max_position_embeddings=32,
    )  # fmt: skip
    model = EnergyModel(EsmForMaskedLM(config), **token_roles(esm, len(esm))).eval()
    assert model.score(["mktayiak", "MKTAYIAK"], esm).num_tokens.tolist() == [1, 8]
    assert len(warnings) == 1
    assert "texts: the tokenizer has no token for something in 1 of 2 rows" in warnings[0]
    assert "row 0 has 1 unknown of 1 tokens, 8 of 8 characters ('mktayiak')." in warnings[0]
    with pytest.raises(ValueError, match=r"texts: .* row 0 has 1 unknown of 1 tokens"):
        model.score(["mktayiak"], esm, unknown_tokens="error")
    model.score(["mktayiak"], esm, unknown_tokens="ignore")
    model.score(["MKT<unk>AY"], esm)  # asked for by name
    assert len(warnings) == 1
    assert unknown_of(esm, "MKTbAY<unk>") == (["b"], 7, 1)


@pytest.mark.parametrize(
    ("kind", "text", "parts", "tokens", "characters"),
    [
        ("wordpiece", "the 犬 sat ☃☃", ["犬", "☃☃"], 4, 3),
        ("wordpiece", "the [UNK] sat", [], 3, 0),
        ("wordpiece", "", [], 0, 0),
        ("metaspace", "the 犬 sat", ["犬"], None, 1),
        ("bytes", "the 犬 sat ☃", [], None, 0),
    ],
)
def test_counts(kind, text, parts, tokens, characters):
    found = unknown_of(small_tokenizer(kind), text)
    assert found.parts == parts
    assert found.characters == characters
    assert tokens is None or found.tokens == tokens


def test_an_unknown_token_with_another_role_is_none():
    own = small_tokenizer("wordpiece")
    own.eos_token = own.unk_token
    assert unknown_of(own, "the 犬").parts == []


def test_one_warning_names_the_first_rows(warnings):
    assert report_unknown(tokenizer(), "texts", ["犬"] * 1000, "warn")
    (message,) = warnings
    assert "in 1000 of 1000 rows" in message
    assert "row 4 has" in message
    assert "row 5 has" not in message
    assert "and 995 more" in message
    assert not report_unknown(tokenizer(), "texts", ["the cat"], "warn")
    with pytest.raises(ValueError, match="unknown_tokens must be one of 'warn', 'error', 'ignore', got 'raise'"):
        report_unknown(tokenizer(), "texts", ["the cat"], "raise")


def test_it_is_logged(caplog):
    energy_model().score(STRANGE, tokenizer())
    (record,) = [one for one in caplog.records if "unknown" in one.getMessage()]
    assert record.levelname == "WARNING"
    assert "row 1 has 1 unknown of 3 tokens, 1 of 9 characters ('犬')" in record.getMessage()


def test_scores_and_lists(warnings):
    model, own = energy_model(), tokenizer()
    for call, name in (
        (lambda how: model.score(STRANGE, own, **how), "texts"),
        (lambda how: model.score(["the"] * 4, own, prefixes=STRANGE, **how), "prefixes"),
        (lambda how: model.score(["the"] * 4, own, suffixes=STRANGE, **how), "suffixes"),
        (lambda how: model.rerank([STRANGE[:2], STRANGE[2:]], own, **how), "texts"),
        (lambda how: residual_model().score(STRANGE, own, **how), "texts"),
        (lambda how: score("predictions", STRANGE, model, own, how.get("unknown_tokens", "warn")), "predictions"),
    ):
        call({})
        assert len(warnings) == 1
        assert warnings.pop().startswith(f"{name}: the tokenizer has no token for something in 2 of 4 rows: row 1 has")
        with pytest.raises(ValueError, match=f"^{name}: .* in 2 of 4 rows: row 1 has .*; row 2 has"):
            call({"unknown_tokens": "error"})
        call({"unknown_tokens": "ignore"})
        assert not warnings
    lines = score_lines(model, own, STRANGE)
    assert [line.unknown for line in lines] == [[], ["犬"], ["☃"], []]
    assert not warnings


@pytest.mark.parametrize(
    ("task", "make", "inputs", "how"),
    [
        ("energy-scoring", energy_model, STRANGE, {}),
        ("energy-reranking", energy_model, [{"candidates": [text, "the"]} for text in STRANGE], {}),
        ("energy-reranking", energy_model, [{"candidates": ["the"], "prefix": text} for text in STRANGE], {}),
        ("energy-reranking", residual_model, [{"candidates": [text, "the"]} for text in STRANGE], {}),
        ("energy-sampling", energy_model, [f"{text} [MASK]" for text in STRANGE], {"num_epochs": 1}),
        ("joint-sampling", residual_model, STRANGE, {"num_candidates": 2, "max_new_tokens": 2}),
    ],
)
def test_pipelines_warn_once_a_call(task, make, inputs, how, warnings, monkeypatch):
    monkeypatch.setattr("hf_ebm.models.residual.generation_residual.logger.warning", lambda message: None)
    pipe = pipeline(task, model=make(), tokenizer=tokenizer())
    for _ in range(2):
        pipe(inputs, **how)
        assert len(warnings) == 1
        assert warnings.pop().startswith("input 1: the tokenizer has no token for something in 1 of")
    pipe(inputs, unknown_tokens="ignore", **how)
    assert not warnings
    with pytest.raises(ValueError, match="input 1: the tokenizer has no token for something"):
        pipe(inputs, unknown_tokens="error", **how)
    with pytest.raises(ValueError, match="unknown_tokens must be one of"):
        pipe(inputs, unknown_tokens=True, **how)


def test_commands(tmp_path, warnings, capsys):
    folder = tmp_path / "model"
    energy_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{text} [MASK]", "candidates": [text]}) + "\n" for text in STRANGE))
    scored = tmp_path / "scored.txt"
    scored.write_text("\n".join(STRANGE))
    commands = [
        ["score", "--input", str(scored), "--output", str(tmp_path / "o.jsonl")],
        ["fill", "--input", str(texts), "--output", str(tmp_path / "o.jsonl"), "--words", "cat"],
        ["rerank", "--input", str(texts), "--output", str(tmp_path / "o.jsonl")],
        ["sample", "--input", str(texts), "--output", str(tmp_path / "s.jsonl"), "--num_epochs", "1"],
    ]
    for command in commands:
        command += ["--model", str(folder), "--device", "cpu"]
        main(command)
        assert len(warnings) == 1
        assert "in 2 of 4 rows" in warnings.pop()
        main([*command, "--unknown_tokens", "ignore"])
        assert not warnings
        with pytest.raises(SystemExit):
            main([*command, "--unknown_tokens", "error"])
        assert "has no token for something in 2 of 4 rows" in capsys.readouterr().err
