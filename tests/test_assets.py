"""The embedded models: what ships with them, that their cards tell the truth, and that they do what they are for."""

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from hf_ebm.assets import (
    CMUDICT_LENGTH,
    KJV_CAUSAL_LM,
    KJV_MASKED_LM,
    PRONUNCIATION,
    held_out_clauses,
    held_out_verses,
    load_embedded,
    load_embedded_causal,
    load_embedded_pronunciation,
    train_causal_lm,
)
from hf_ebm.assets.train_masked_lm import held_out_loss
from hf_ebm.data.bibles import MAX_WORDS, MIN_WORDS, completion_rows, split_clauses
from hf_ebm.data.cmudict_tasks import load_g2p
from hf_ebm.data.metrics import transcription_scores
from hf_ebm.models.energy import length_log_probs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def embedded():
    return load_embedded()


def test_size_precision_and_card():
    assert (KJV_MASKED_LM / "model.safetensors").stat().st_size <= 12e6
    assert json.loads((KJV_MASKED_LM / "config.json").read_text())["dtype"] == "float16"
    results = json.loads((KJV_MASKED_LM / "training_results.json").read_text())
    card = ModelCard.load(KJV_MASKED_LM / "README.md")
    assert card.data.license == "apache-2.0"
    assert all(f"{loss:.2f}" in card.text for loss in results["held_out_loss"].values())
    assert all(phase["command"] in card.text for phase in results["phases"])
    assert card.text.count("\n| ") >= 20


def test_the_stated_loss_is_the_models(embedded):
    model, tokenizer = embedded
    stated = json.loads((KJV_MASKED_LM / "training_results.json").read_text())["held_out_loss"]["15%"]
    found = held_out_loss(model.mlm, tokenizer, held_out_clauses()[::6], 0.15, draws=1)
    assert found == pytest.approx(stated, abs=0.2)  # a sixth of the clauses, once


def test_it_prefers_the_book_to_shuffled_words(embedded):
    model, tokenizer = embedded
    clauses = [clause for clause in held_out_clauses() if len(clause.split()) > 8][::100]
    generator = torch.Generator().manual_seed(0)
    shuffled = []
    for clause in clauses:
        words = clause.split()
        shuffled.append(" ".join(words[i] for i in torch.randperm(len(words), generator=generator)))
    better = model.score(clauses, tokenizer).energy < model.score(shuffled, tokenizer).energy
    assert float(better.double().mean()) > 0.9


def test_chains_get_from_noise_to_the_book(embedded):
    model, tokenizer = embedded
    out = model.generate(lengths=8, num_chains=4, num_epochs=6, block_size=2, block_fill="sequential", seed=0)
    assert out.energies.isfinite().all()
    assert float(out.energies[:, -1].mean()) < float(out.energies[:, 0].mean())
    assert not torch.isin(out.samples[..., 1:-1], torch.tensor(tokenizer.all_special_ids)).any()
    torch.testing.assert_close(model(out.sequences).energy.double(), out.energies[:, -1], rtol=1e-4, atol=1e-3)


def test_clauses_are_whole_and_of_the_stated_length():
    verse = (
        "And God said, Let there be light: and there was light. And God saw the light, that it was good: and God "
        "divided the light from the darkness, and the evening and the morning were the first day, and so it was; Selah."
    )
    clauses = split_clauses(verse)
    assert all(MIN_WORDS <= len(clause.split()) <= MAX_WORDS for clause in clauses)
    assert " ".join(clauses) == verse
    assert clauses[:2] == ["And God said, Let there be light:", "and there was light."]
    assert split_clauses("Jesus wept.") == []
    assert all(MIN_WORDS <= len(clause.split()) <= MAX_WORDS for clause in held_out_clauses())


@pytest.fixture(scope="module")
def causal():
    return load_embedded_causal()


def test_size_precision_and_card_of_the_causal_model():
    assert sum(path.stat().st_size for path in KJV_CAUSAL_LM.iterdir()) <= 12e6
    assert json.loads((KJV_CAUSAL_LM / "config.json").read_text())["dtype"] == "float16"
    results = json.loads((KJV_CAUSAL_LM / "training_results.json").read_text())
    card = ModelCard.load(KJV_CAUSAL_LM / "README.md")
    assert card.data.license == "apache-2.0"
    assert all(f"{loss:.2f}" in card.text for loss in results["loss"].values())
    assert all(phase["command"] in card.text for phase in results["phases"])
    assert len(re.findall(r"^\d+\. ", card.text, re.MULTILINE)) == 20
    assert not any("/tmp" in path.read_text(encoding="utf-8") for path in KJV_CAUSAL_LM.glob("*.[jm][sd]*"))


def test_the_causal_model_is_stored_bit_for_bit(tmp_path, causal):
    stored = load_file(KJV_CAUSAL_LM / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float16}
    assert all(torch.equal(weight.float(), causal[0].state_dict()[name]) for name, weight in stored.items())
    model, tokenizer = load_embedded_causal(dtype="auto")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    assert (tmp_path / "tokenizer.json").read_bytes() == (KJV_CAUSAL_LM / "tokenizer.json").read_bytes()


def test_the_stated_loss_is_the_causal_models(causal):
    model, tokenizer = causal
    stated = json.loads((KJV_CAUSAL_LM / "training_results.json").read_text())["loss"]["test"]
    assert train_causal_lm.held_out_loss(model, tokenizer, held_out_verses()[1][::6]) == pytest.approx(stated, abs=0.1)


def test_both_models_share_their_tokens_and_held_out_text(causal, embedded):
    assert causal[1].backend_tokenizer.to_str() == embedded[1].backend_tokenizer.to_str()
    validation, test = held_out_verses()
    assert [len(validation), len(test)] == [778, 777]
    assert len(set(validation) & set(test)) == 1  # the book repeats itself
    text = " ".join([*validation, *test])
    assert all(clause in text for clause in held_out_clauses())


def test_the_causal_model_prefers_the_book_to_shuffled_words(causal):
    model, tokenizer = causal
    verses = [verse for verse in held_out_verses()[1] if len(verse.split()) > 8][::15]
    generator = torch.Generator().manual_seed(0)
    better = []
    for verse in verses:
        words = verse.split()
        shuffled = " ".join(words[i] for i in torch.randperm(len(words), generator=generator))
        losses = [train_causal_lm.held_out_loss(model, tokenizer, [text]) for text in (verse, shuffled)]
        better.append(losses[0] < losses[1])
    assert sum(better) > 0.9 * len(better)


def test_the_causal_model_goes_on_from_prompts_and_mostly_ends_samples(causal):
    model, tokenizer = causal
    rows = completion_rows(held_out_verses()[1], tokenizer)[:16]
    prompts = torch.tensor([row["input_ids"][:10] for row in rows])
    mask = torch.ones_like(prompts)
    greedy = model.generate(input_ids=prompts, attention_mask=mask, do_sample=False, max_new_tokens=150)
    assert torch.equal(greedy[:, :10], prompts)
    alone = model.generate(input_ids=prompts[:1], attention_mask=mask[:1], do_sample=False, max_new_tokens=5)
    assert torch.equal(alone[0, 10:15], greedy[0, 10:15])
    torch.manual_seed(0)
    start = torch.full((16, 1), tokenizer.cls_token_id)
    drawn = model.generate(input_ids=start, do_sample=True, top_k=0, max_new_tokens=120)
    assert float((drawn == tokenizer.sep_token_id).any(1).double().mean()) > 0.8


def test_rows_of_completions(causal):
    tokenizer = causal[1]
    verses = ["Jesus wept.", "And God said, Let there be light: and there was light, and it was so."]
    rows = completion_rows(verses, tokenizer, prompt_length=6)
    whole = tokenizer(verses[1])["input_ids"]
    assert len(rows) == 1 and rows[0]["input_ids"] == whole and rows[0]["attention_mask"] == [1] * len(whole)
    assert rows[0]["labels"] == [-100] * 6 + whole[6:] and whole[-1] == tokenizer.sep_token_id
    assert len(completion_rows(verses, tokenizer, prompt_length=len(whole) - 1)) == 0
    assert len(completion_rows(verses, tokenizer, prompt_length=len(whole) - 2)) == 1


@pytest.mark.parametrize("folder", [*PRONUNCIATION.values(), CMUDICT_LENGTH], ids=lambda folder: folder.name)
def test_size_precision_and_card_of_the_pronunciation_models(folder):
    assert (folder / "model.safetensors").stat().st_size <= 2e6
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    results = json.loads((folder / "training_results.json").read_text())
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0"
    assert all(f"{loss:.3f}" in card.text for loss in results["loss"].values())
    assert all(phase["command"] in card.text for phase in results["phases"])
    assert f"{results['rows']['train']:,}" in card.text and "Carnegie Mellon" in card.text


@pytest.mark.parametrize("kind", PRONUNCIATION)
def test_the_stated_accuracy_is_the_pronunciation_models(kind):
    model, tokenizer, _ = load_embedded_pronunciation(kind)
    words = load_g2p()["test"][:200]
    lengths = [len(target.split()) for target in words["target"]]
    best = model.generate_from_sources(words["source"], tokenizer, lengths=lengths, decoder="mask_predict", seed=0)
    found = transcription_scores([own[0] for own in best.texts], words["references"])
    card = ModelCard.load(PRONUNCIATION[kind] / "README.md").text
    error, accuracy = (f"{100 * found[name]:.1f}" for name in ("phoneme_error_rate", "word_accuracy"))
    assert f"| mask-predict, 10 iterations | {error} | {accuracy} |" in card
    assert found["phoneme_error_rate"] < 0.25
    assert not {"a", "z"} & {symbol for own in best.texts for symbol in own[0].split()}  # letters are never proposed


def test_lengths_of_words():
    _, tokenizer, length_model = load_embedded_pronunciation()
    words = load_g2p()["test"][:500]
    best = 1 + length_log_probs(length_model, tokenizer, words["source"]).argmax(1)
    right = (best == torch.tensor([len(target.split()) for target in words["target"]])).double().mean()
    assert float(right) > 0.6


def test_an_unknown_kind_of_pronunciation_model_is_refused():
    with pytest.raises(ValueError, match="kind must be one of masked, encoder_decoder, got 'lstm'"):
        load_embedded_pronunciation("lstm")
