"""`EnergyModel.from_pretrained` and the constructor: what they take, what they refuse."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    XLMConfig,
    XLMWithLMHeadModel,
)

from hf_ebm import EnergyConfig, EnergyModel
from tests.conftest import tiny_mlm
from tests.models.tokenizers_for_tests import small_model, small_tokenizer

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)


@pytest.fixture
def checkpoint(tmp_path):
    """A plain masked-LM checkpoint with its tokenizer."""
    tokenizer = small_tokenizer("wordpiece")
    small_model(tokenizer).mlm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_plain_checkpoint_and_a_saved_model_load_alike(checkpoint, tmp_path):
    model = EnergyModel.from_pretrained(checkpoint, energy="raw")
    model.save_pretrained(tmp_path / "saved")
    saved = EnergyModel.from_pretrained(tmp_path / "saved")
    assert saved.config.energy == "raw" and saved.config.mask_token_id == model.config.mask_token_id
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    assert EnergyModel.from_pretrained(tmp_path / "saved", energy="local").config.energy == "local"
    assert isinstance(AutoModel.from_pretrained(tmp_path / "saved"), EnergyModel)
    config = AutoConfig.from_pretrained(tmp_path / "saved")
    assert isinstance(config, EnergyConfig)
    assert EnergyModel.from_pretrained(tmp_path / "saved", config=config, energy="local").config.energy == "local"


def test_the_usual_arguments_work(checkpoint, tmp_path):
    half = EnergyModel.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation="eager", device_map="cpu")
    assert half.mlm.dtype == torch.bfloat16 and half.mlm.config._attn_implementation == "eager"
    model, info = EnergyModel.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and isinstance(model, EnergyModel)
    chosen = EnergyModel.from_pretrained(checkpoint, masking="unmasked", hidden_dropout_prob=0.25)
    assert chosen.config.masking == "unmasked" and chosen.mlm.config.hidden_dropout_prob == 0.25
    below = tmp_path / "repository" / "below"
    EnergyModel.from_pretrained(checkpoint).save_pretrained(below)
    assert EnergyModel.from_pretrained(tmp_path / "repository", subfolder="below").config.mask_token_id == 4


@pytest.mark.half_precision
def test_half_precision_models_give_energies_in_float32(checkpoint):
    full = EnergyModel.from_pretrained(checkpoint, dtype=torch.float32)
    half = EnergyModel.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ids = torch.tensor([[2, 10, 11, 12, 3]])
    energies = [model(ids).energy.detach() for model in (half, full)]
    assert energies[0].dtype == torch.float32
    assert float(energies[0]) == pytest.approx(float(energies[1]), rel=0.05)
    out = half.generate(lengths=4, num_chains=3, num_epochs=3, seed=0)
    again = half.generate(lengths=4, num_chains=3, num_epochs=3, seed=0, token_budget=12)
    assert torch.equal(out.samples, again.samples) and out.energies.isfinite().all()


@pytest.mark.parametrize("drop", ["encoder.layer.0.output.dense.weight", "lm_head.dense.weight"])
@pytest.mark.parametrize("saved", [False, True])
def test_missing_weights_are_an_error(checkpoint, tmp_path, drop, saved):
    folder = checkpoint
    if saved:
        folder = tmp_path / "saved"
        EnergyModel.from_pretrained(checkpoint).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.endswith(drop)}
    assert len(kept) == len(weights) - 1
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"has no weights for .*{drop}"):
        EnergyModel.from_pretrained(folder)


def test_a_checkpoint_without_a_tokenizer_knows_no_mask(tmp_path):
    """Transformers would make up a tokenizer from the configuration; its mask id would be wrong."""
    tiny_mlm().save_pretrained(tmp_path)
    model = EnergyModel.from_pretrained(tmp_path)
    assert model.config.mask_token_id is None
    for use in (lambda: model(torch.tensor([[1, 5, 2]])), lambda: model.generate(lengths=3)):
        with pytest.raises(ValueError, match="mask_token_id"):
            use()
    tokenizer = small_tokenizer("wordpiece")
    with pytest.raises(ValueError, match="model's vocabulary has 4 ids"):
        tiny_mlm(vocab_size=4).save_pretrained(tmp_path / "small")
        EnergyModel.from_pretrained(tmp_path / "small", processing_class=tokenizer)
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="has no mask token"):
        EnergyModel.from_pretrained(tmp_path, processing_class=tokenizer)


WRONG = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)),
    "classifier": lambda: BertForSequenceClassification(BertConfig(**SIZES)),
    "decoder": lambda: BertLMHeadModel(BertConfig(**SIZES, is_decoder=True)),
    "causal": lambda: XLMWithLMHeadModel(XLMConfig(emb_dim=16, n_layers=1, n_heads=2, vocab_size=50, causal=True)),
}


REFUSALS = r"masked-LM head|masked-language-model head|bidirectional|has no weights"


@pytest.mark.parametrize("kind", WRONG)
def test_models_that_are_no_masked_lm_are_refused(kind, tmp_path):
    model = WRONG[kind]()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSALS):
        EnergyModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSALS):
        EnergyModel(model)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"energy": "free"}, "energy must be one of"),
        ({"masking": "quick"}, "masking must be one of"),
        ({"enrgy": "raw"}, "EnergyModel has no argument enrgy"),
    ],
)
def test_bad_fields_are_refused(arguments, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        EnergyModel(tiny_mlm(), **arguments)
    if "enrgy" not in arguments:
        with pytest.raises(ValueError, match=message):
            EnergyModel.from_pretrained(checkpoint, **arguments)


def test_outputs_as_tuples_do_not_matter():
    model = EnergyModel(tiny_mlm(), mask_token_id=3, special_token_ids=[0, 1, 2])
    ids = torch.tensor([[1, 5, 6, 2]])
    expected = model(ids).energy
    model.mlm.config.return_dict = False
    torch.testing.assert_close(model(ids).energy, expected)


def test_wrapping_touches_no_weight():
    """Modules that were put in by hand are not initialised anew."""
    mlm = tiny_mlm()
    mlm.cls.predictions.transform.dense = torch.nn.Linear(16, 16)
    before = {name: value.clone() for name, value in mlm.state_dict().items()}
    model = EnergyModel(mlm, mask_token_id=3)
    assert model.mlm is mlm
    assert all(torch.equal(before[name], value) for name, value in mlm.state_dict().items())


def test_the_checkpoints_own_dtype_is_kept_on_request(checkpoint):
    EnergyModel.from_pretrained(checkpoint, dtype=torch.bfloat16).mlm.save_pretrained(checkpoint)
    assert EnergyModel.from_pretrained(checkpoint, dtype="auto").mlm.dtype == torch.bfloat16
