"""What models read beside tokens: energies and chains against the stock forward with the same inputs."""

import json

import pytest
import torch
import transformers as tf
from transformers import AutoTokenizer

import hf_ebm.pipelines  # noqa: F401  # registers the tasks
from hf_ebm import EnergyModel
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig
from tests.cli.conftest import read, run
from tests.models.families import tiny_family_model
from tests.models.residual_models import toy_lm
from tests.models.test_families import MASK, ragged_batch, wrap
from tests.models.tokenizers_for_tests import small_tokenizer

ROWS, COLUMNS = 3, 12


def numbers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape or (ROWS, COLUMNS), generator=torch.Generator().manual_seed(8))


# The last row is padded on the left, which entities, whose places count from there, cannot be.
BY_TOKEN = {
    "bert": {"token_type_ids": numbers(2)},
    "ernie": {"token_type_ids": numbers(2), "task_type_ids": numbers(3)},
    "esmc": {"sequence_id": numbers(2).sort(1).values},
    "flaubert": {"langs": numbers(3)},
    "layoutlm": {"bbox": numbers(50, ROWS, COLUMNS, 4).sort(2).values},
    "longformer": {"global_attention_mask": numbers(2)},
    "roberta": {"position_ids": numbers(100)},
    "tapas": {"token_type_ids": numbers(2, ROWS, COLUMNS, 7)},
    "xlm": {"langs": numbers(3), "token_type_ids": numbers(9)},
    "xmod": {"lang_ids": torch.tensor([0, 1, 1])},
}


@torch.no_grad()
def stock_energy(model: EnergyModel, ids: torch.Tensor, inputs: dict) -> float:
    """One row, one masked position at a time."""
    total = 0.0
    for position in range(len(ids)):
        if int(ids[position]) > 2:
            masked = ids.clone()[None]
            masked[0, position] = MASK
            logits = model.mlm(input_ids=masked, **inputs).logits[0, position]
            total -= float(logits.log_softmax(-1)[ids[position]])
    return total


@pytest.mark.parametrize("family", BY_TOKEN)
def test_energies_are_those_of_the_stock_forward_with_the_same_inputs(family):
    model, (ids, mask), inputs = wrap(family), ragged_batch(), BY_TOKEN[family]
    found = model(ids, mask, **inputs).energy.detach()
    for row in range(ROWS):
        kept = mask[row].bool()
        own = {
            name: value[row : row + 1] if value.dim() == 1 else value[row : row + 1, kept]
            for name, value in inputs.items()
        }
        assert float(found[row]) == pytest.approx(stock_energy(model, ids[row, kept], own), abs=1e-4)
    for name, value in inputs.items():  # each of them matters
        other = model(ids, mask, **{**inputs, name: value.flip(0)}).energy.detach()
        assert float((other - found).abs().max()) > 1e-3


def test_entities_of_whole_rows():
    model, ids = wrap("luke"), ragged_batch()[0][:2, :9]
    entities = {
        "entity_ids": torch.tensor([[3, 4], [5, 6]]),
        "entity_attention_mask": torch.ones(2, 2, dtype=torch.long),
        "entity_token_type_ids": torch.zeros(2, 2, dtype=torch.long),
        "entity_position_ids": torch.tensor([[[1, 2], [4, -1]], [[2, 3], [5, 6]]]),
    }
    found = model(ids, **entities).energy.detach()
    for row in range(2):
        own = {name: value[row : row + 1] for name, value in entities.items()}
        assert float(found[row]) == pytest.approx(stock_energy(model, ids[row], own), abs=1e-4)
    assert not torch.allclose(found, model(ids).energy.detach(), atol=1e-3)
    with pytest.raises(ValueError, match="entity_position_ids count from a row's first token"):
        model(ids, torch.tensor([[0, 1] + [1] * 7, [1] * 9]).long(), **entities)


@pytest.mark.parametrize(
    "family,inputs,message",
    [
        ("luke", {"entity_ids": [[1], [2], [3]]}, "got some without entity_position_ids"),
        ("luke", {"entity_ids": 3}, r"of shape \(3, …\), got shape \(\)"),
        ("luke", {"entity_ids": [[1, 1]] * 3, "entity_position_ids": [[[1]]] * 3}, "different numbers of entities"),
        (
            "luke",
            {"entity_ids": [[1]] * 3, "entity_position_ids": [[[999]]] * 3},
            "entity_position_ids must hold numbers",
        ),
        ("tapas", {"token_type_ids": 9999}, r"token_type_ids must hold numbers from 0 to \[2, 255"),
        ("xlm", {"langs": 0, "token_type_ids": 101}, "token_type_ids must hold numbers from 0 to 100, got 101"),
        ("layoutlm", {"bbox": torch.tensor([5, 5, 4, 6]).expand(3, 12, 4)}, "left <= right and top <= bottom"),
        ("xmod", {"lang_ids": [[0], [1], [1]]}, r"of shape \(3\), got shape \(3, 1\)"),
    ],
)
def test_inputs_of_wrong_kinds_are_refused_by_name(family, inputs, message):
    with pytest.raises(ValueError, match=message):
        wrap(family)(*ragged_batch(), **inputs)


def test_segments_of_zeros_are_given_on_and_what_stands_in_padding_is_nobodys_business():
    model, (ids, mask) = wrap("xlm"), ragged_batch()
    zeros = model(ids, mask, langs=1, token_type_ids=0).energy.detach()
    own = {"langs": torch.ones(1, 12, dtype=torch.long), "token_type_ids": torch.zeros(1, 12, dtype=torch.long)}
    assert float(zeros[0]) == pytest.approx(stock_energy(model, ids[0], own), abs=1e-4)
    assert abs(float(model(ids, mask, langs=1).energy[0].detach() - zeros[0])) > 1e-3
    padded = torch.where(mask.bool(), 1, 999)
    assert torch.equal(model(ids, mask, langs=padded).energy, model(ids, mask, langs=1).energy)
    assert torch.isfinite(wrap("modernbert")(ids, mask, token_type_ids=torch.zeros_like(ids)).energy).all()


def test_sources_have_a_number_each_also_where_lengths_compete():
    tokenizer = small_tokenizer("wordpiece")
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), emb_dim=16, n_layers=1, n_heads=2, n_langs=3, pad_token_id=0)
    model = EnergyModel(tf.XLMWithLMHeadModel(tf.XLMConfig(**sizes)).eval(), **_roles(tokenizer))
    lengths = tf.BertForSequenceClassification(
        tf.BertConfig(
            vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=5
        )
    ).eval()
    settings = dict(num_chains=2, num_epochs=2, seed=3, lengths="energy", length_model=lengths, num_lengths=2)
    out = model.generate_from_sources(["the cat", "a dog"], tokenizer, langs=[1, 2], **settings)
    chains = out.chains
    langs = 1 + chains.prompt_indices
    again = model(chains.sequences, chains.attention_mask, chains.run.free, langs=langs).energy
    torch.testing.assert_close(chains.energies[:, -1].float(), again.detach(), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="langs must be one number, or one for each of the 2 sources"):
        model.generate_from_sources(["the cat", "a dog"], tokenizer, langs=[1], **settings)


def test_one_number_stands_for_all_and_one_a_row_for_its_tokens():
    model, (ids, mask) = wrap("xlm"), ragged_batch()
    whole = torch.tensor([0, 2, 1])
    by_row = model(ids, mask, langs=whole[:, None].expand(ROWS, COLUMNS)).energy
    assert torch.equal(model(ids, mask, langs=whole).energy, by_row)
    assert torch.equal(model(ids, mask, langs=[0, 2, 1]).energy, by_row)
    assert torch.equal(model(ids[1:2], mask[1:2], langs=2).energy, model(ids[1:2], mask[1:2], langs=[[2] * 12]).energy)
    assert torch.equal(model.score_ids(ids, mask, further_inputs={"langs": whole}).sum(1), by_row.detach())


def test_chains_keep_their_inputs_also_when_they_are_saved_and_go_on(tmp_path):
    model, (ids, mask) = wrap("xlm"), ragged_batch()
    langs = numbers(3)
    settings = dict(num_chains=2, block_size=2, seed=1)
    out = model.generate(ids, mask, langs=langs, num_epochs=4, **settings)
    again = model(out.sequences, out.attention_mask, langs=langs.repeat_interleave(2, 0)).energy
    torch.testing.assert_close(out.energies[:, -1].float(), again.detach(), atol=1e-4, rtol=0)
    model.generate(ids, mask, langs=langs, num_epochs=2, save_state_to=tmp_path, **settings)
    resumed = model.generate(resume_from=tmp_path, num_epochs=4)
    assert torch.equal(resumed.sequences, out.sequences) and torch.equal(resumed.energies, out.energies)
    with pytest.raises(ValueError, match="leave out langs"):
        model.generate(resume_from=tmp_path, langs=langs, num_epochs=4)
    free = model.generate(lengths=4, num_epochs=2, seed=0, langs=1)
    torch.testing.assert_close(
        free.energies[:, -1].float(), model(free.sequences, langs=1).energy.detach(), atol=1e-4, rtol=0
    )
    with pytest.raises(ValueError, match="langs: with lengths and no input_ids it must be one number"):
        model.generate(lengths=4, langs=[1, 1])


def test_texts_have_a_number_each():
    tokenizer = small_tokenizer("wordpiece")
    config = tf.BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = EnergyModel(tf.BertForMaskedLM(config).eval(), **_roles(tokenizer))
    texts = ["the cat", "a dog sat on the mat", "the cat"]
    zeros, ones = (model.score(texts, tokenizer, further_inputs={"token_type_ids": n}).energy for n in (0, 1))
    assert torch.equal(zeros, model.score(texts, tokenizer).energy) and not torch.allclose(zeros, ones)
    mixed = model.score(texts, tokenizer, further_inputs={"token_type_ids": [0, 1, 1]}).energy
    torch.testing.assert_close(mixed, torch.stack([zeros[0], ones[1], ones[2]]))
    with pytest.raises(ValueError, match=r"token_type_ids must be .*each of the 3 texts"):
        model.score(texts, tokenizer, further_inputs={"token_type_ids": [0, 1]})


def _roles(tokenizer):
    return {"mask_token_id": tokenizer.mask_token_id, "special_token_ids": tokenizer.all_special_ids}


@pytest.mark.parametrize(
    "family,name", [("xlm", "langs"), ("flaubert", "langs"), ("xmod", "lang_ids"), ("layoutlm", "bbox")]
)
def test_what_a_model_needs_is_asked_for_by_name(family, name):
    model, (ids, mask) = wrap(family), ragged_batch()
    for call in (lambda: model(ids, mask), lambda: model.generate(ids, mask), lambda: model.generate(lengths=3)):
        with pytest.raises(ValueError, match=f"{name}: .*ForMaskedLM|{name}: .*HeadModel needs it"):
            call()


def test_models_that_need_more_than_tokens_are_refused_where_they_get_no_more(tmp_path):
    config = tiny_family_model("xlm").config
    with pytest.raises(ValueError, match="encoder: XLMModel needs langs, which can't be given here"):
        ResidualEnergyModel(toy_lm(dtype=torch.float32), tf.XLMModel(config))
    args = EnergyTrainingConfig(output_dir=str(tmp_path), report_to=[])
    with pytest.raises(ValueError, match="model: XLMWithLMHeadModel needs langs"):
        EnergyTrainer(wrap("xlm"), args)
    trainer = EnergyTrainer(wrap("bert"), args)
    with pytest.raises(ValueError, match="token_type_ids must be left out"):
        trainer.check_batch({"input_ids": ragged_batch()[0], "token_type_ids": torch.ones(3, 12)})


def test_rocberts_shapes_and_sounds_would_give_the_masked_token_away():
    for setting in ({}, {"enable_shape": False}, {"enable_pronunciation": False}):
        config = tf.RoCBertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, **setting
        )
        with pytest.raises(ValueError, match="'roc_bert' reads a shape and a pronunciation"):
            EnergyModel(tf.RoCBertForMaskedLM(config))


@pytest.fixture(scope="module")
def xlm_folder(tmp_path_factory) -> str:
    folder, tokenizer = str(tmp_path_factory.mktemp("xlm")), small_tokenizer("wordpiece")
    torch.manual_seed(0)
    config = tf.XLMConfig(vocab_size=len(tokenizer), emb_dim=16, n_layers=1, n_heads=2, n_langs=3, pad_token_id=0)
    tf.XLMWithLMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_commands_take_a_number_for_all(xlm_folder, tmp_path, capsys):
    model, tokenizer = EnergyModel.from_pretrained(xlm_folder).eval(), AutoTokenizer.from_pretrained(xlm_folder)
    texts, prompt = ["the cat", "the dog sat"], "the [MASK] sat"
    with open(tmp_path / "in.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text, "candidates": texts}) + "\n" for text in texts)
    where = ("--model", xlm_folder, "--output", tmp_path / "out.jsonl")
    given = ("--further_inputs", '{"langs": 2}')
    expected = [model.score(texts, tokenizer, further_inputs={"langs": lang}).energy.tolist() for lang in (2, 0)]
    assert expected[0] != expected[1]
    run("score", "--input", tmp_path / "in.jsonl", *where, *given)
    assert [record["energy"] for record in read(tmp_path / "out.jsonl")] == pytest.approx(expected[0], abs=1e-5)
    run("rerank", "--input", tmp_path / "in.jsonl", *where, *given)
    assert read(tmp_path / "out.jsonl")[1]["energies"] == pytest.approx(expected[0], abs=1e-5)
    where = ("--model", xlm_folder, "--output", tmp_path / "samples.jsonl", "--num_epochs", 2, "--seed", 1)
    run("sample", "--text", prompt, *where, *given)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, langs=2, num_epochs=2, seed=1)
    found = read(tmp_path / "samples.jsonl")
    assert [record["energy"] for record in found] == pytest.approx(out.energies[0].tolist(), abs=1e-5)
    for command in (("score", "--input", tmp_path / "in.jsonl"), ("sample", "--lengths", 3)):
        with pytest.raises(SystemExit):
            run(*command, "--model", xlm_folder, "--output", tmp_path / "no.jsonl")
        assert "langs: XLMWithLMHeadModel needs it" in capsys.readouterr().err
    for wrong in ("7", "[1]", '{"langs": "en"}', "{"):
        with pytest.raises(SystemExit):
            run("score", "--model", xlm_folder, "--further_inputs", wrong)
        assert "further_inputs must be whole numbers by name" in capsys.readouterr().err


def test_pipelines_take_a_number_for_all(xlm_folder):
    model, tokenizer = EnergyModel.from_pretrained(xlm_folder).eval(), AutoTokenizer.from_pretrained(xlm_folder)
    given = {"model": model, "tokenizer": tokenizer, "further_inputs": {"langs": 2}}
    expected = float(model.score(["the cat"], tokenizer, further_inputs={"langs": 2}).energy)
    scored = tf.pipeline("energy-scoring", **given)("the cat")
    ranked = tf.pipeline("energy-reranking", **given)({"candidates": ["the cat"]})
    assert scored["energy"] == pytest.approx(expected) == ranked[0]["energy"]
    samples = tf.pipeline("energy-sampling", **given)("the [MASK]", num_epochs=2, seed=1)
    out = model.generate(tokenizer("the [MASK]", return_tensors="pt")["input_ids"], langs=2, num_epochs=2, seed=1)
    assert [sample["energy"] for sample in samples] == pytest.approx(out.energies[0].tolist(), abs=1e-5)
