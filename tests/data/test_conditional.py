"""Rows of source and target for masked language models, and the collator that masks targets."""

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import BartConfig, BartForConditionalGeneration, Trainer, TrainingArguments, set_seed

from hf_ebm import EnergyModel
from hf_ebm.data.conditional import MaskedTargetCollator, draw_masked, encode_conditional
from hf_ebm.data.symbols import symbol_tokenizer
from tests.conftest import tiny_mlm
from tests.models.tokenizers_for_tests import KINDS, small_tokenizer


def pairs(*rows: tuple[str, str]) -> Dataset:
    return Dataset.from_dict({"source": [source for source, _ in rows], "target": [target for _, target in rows]})


@pytest.fixture
def tokenizer():
    return symbol_tokenizer(["X Y Z"], ["a b"], model_max_length=9, masks=True)


def tiny_bart(vocab_size: int) -> BartForConditionalGeneration:
    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=vocab_size, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=24,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, dropout=0.0,
        )
    ).eval()  # fmt: skip


def test_ids_of_a_tokenizer_with_masks(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(10)) == ["<pad>", "<s>", "</s>", "<unk>", "<mask>", *"XYZab"]
    assert tokenizer.mask_token_id == 4 and symbol_tokenizer(["X"], ["a"]).mask_token_id is None
    assert tokenizer("a <mask>b")["input_ids"] == [8, 4, 9, 2]


def test_a_row_is_source_and_target_with_the_target_free(tokenizer):
    encoded = encode_conditional(DatasetDict({"train": pairs(("a b", "X Y Z"), ("b", "Z"))}), tokenizer)["train"]
    assert encoded[0] == {
        "input_ids": [8, 9, 2, 5, 6, 7, 2],
        "free_mask": [False, False, False, True, True, True, False],
    }
    assert encoded[1] == {"input_ids": [9, 2, 7, 2], "free_mask": [False, False, True, False]}


def test_an_encoder_decoder_has_the_source_in_its_encoder(tokenizer):
    encoded = encode_conditional(pairs(("a b", "X Y Z")), tokenizer, encoder_decoder=True)
    assert encoded[0] == {
        "input_ids": [5, 6, 7, 2],
        "free_mask": [True, True, True, False],
        "encoder_input_ids": [8, 9, 2],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_of_the_usual_kinds(kind):
    tokenizer = small_tokenizer(kind)
    source, target = "the cat sat", "on the mat"
    row = encode_conditional(pairs((source, target)), tokenizer)[0]
    assert row["input_ids"] == tokenizer(source, target)["input_ids"]
    free = [i for i, free in zip(row["input_ids"], row["free_mask"], strict=True) if free]
    assert tokenizer.decode(free).strip() == target


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("a", "X <mask>"), "target must not hold <mask>, got 'X <mask>'"),
        (("a <mask>", "X"), "source must not hold <mask>"),
        (("a", "X b"), "target of row 1 holds 'b'"),
        (("a", "Q"), "target of row 1 holds 'Q'"),
        (("a", ""), "target of row 1 has no token"),
        (("a </s>", "X"), "source of row 1 holds '</s>'"),
        (("a a a a a", "X X X"), "row 1 has 10 tokens, more than the 9"),
    ],
)
def test_rows_that_are_refused(tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        encode_conditional(pairs(("a", "X"), row), tokenizer)


def test_a_tokenizer_without_a_mask_is_refused():
    plain = symbol_tokenizer(["X"], ["a"])
    with pytest.raises(ValueError, match="must have a mask token"):
        encode_conditional(pairs(("a", "X")), plain)
    with pytest.raises(ValueError, match="must have a mask token"):
        MaskedTargetCollator(plain)


def test_every_number_of_masks_is_as_likely():
    free = torch.zeros(6000, 7, dtype=torch.bool)
    free[:, 2:6] = True
    masked = draw_masked(free, torch.Generator().manual_seed(0))
    assert not bool((masked & ~free).any())
    numbers = torch.bincount(masked.sum(1), minlength=5) / 6000
    assert numbers[0] == 0 and bool(((numbers[1:] - 0.25).abs() < 0.025).all())
    assert bool(((masked[:, 2:6].float().mean(0) - 0.625).abs() < 0.03).all())
    assert torch.equal(draw_masked(free[:, :3], None), free[:, :3])  # a target of one token


def test_a_batch_masks_targets_alone(tokenizer):
    encoded = encode_conditional(pairs(("a b", "X Y Z"), ("b", "Z")), tokenizer)
    batch = MaskedTargetCollator(tokenizer, generator=torch.Generator().manual_seed(1))(list(encoded))
    masked = batch["input_ids"] == 4
    assert torch.equal(masked, batch["labels"] != -100) and bool(masked.any(1).all())
    whole = batch["input_ids"].where(~masked, batch["labels"])
    assert whole.tolist() == [[8, 9, 2, 5, 6, 7, 2], [9, 2, 7, 2, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 7, [1] * 4 + [0] * 3]


def test_the_decoder_reads_the_masked_target_shifted(tokenizer):
    rows = list(encode_conditional(pairs(("a b", "X Y Z"), ("b", "Z")), tokenizer, encoder_decoder=True))
    with pytest.raises(ValueError, match="model must be given"):
        MaskedTargetCollator(tokenizer)(rows)
    batch = MaskedTargetCollator(tokenizer, tiny_bart(10), torch.Generator().manual_seed(1))(rows)
    assert batch["input_ids"].tolist() == [[8, 9, 2], [9, 2, 0]]
    masked = batch["labels"] != -100
    assert torch.equal(batch["decoder_input_ids"][:, 1:] == 4, masked[:, :-1])
    assert batch["decoder_input_ids"][:, 0].tolist() == [2, 2]


@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_the_stock_trainers_loss_is_the_energy_of_single_masks(tokenizer, encoder_decoder, tmp_path):
    """Targets of one token have one mask each, so the loss is their mean local energy."""
    rows = encode_conditional(pairs(("a b", "X"), ("b", "Z"), ("a", "Y")), tokenizer, encoder_decoder)
    set_seed(0)
    mlm = tiny_bart(10) if encoder_decoder else tiny_mlm(10)
    model = EnergyModel(mlm, mask_token_id=4, pad_token_id=0, special_token_ids=[0, 1, 2, 4])
    energies = []
    for row in rows:
        inputs = {name: torch.tensor([row[name]]) for name in row}
        energies.append(float(model(**inputs).energy.detach()))
    trainer = Trainer(
        mlm, TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, remove_unused_columns=False),
        eval_dataset=rows, data_collator=MaskedTargetCollator(tokenizer, mlm),
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(energies) / 3, rel=1e-5)
