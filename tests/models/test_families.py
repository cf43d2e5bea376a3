"""Every family of Transformers' masked-LM mapping: energies, round trips and sampling, or a clear refusal."""

import copy
import json

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_ebm import EnergyModel
from hf_ebm.model_facts import max_length
from hf_ebm.models.energy.inputs import UNSUPPORTED_MODEL_TYPES
from tests.models.families import NEEDED_INPUTS, tiny_family_model
from tests.module_state import state_of

pytestmark = pytest.mark.slow

FAMILIES = sorted(set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) - set(UNSUPPORTED_MODEL_TYPES))
MASK = 4
ENERGIES = ("local", "raw")


def wrap(model_type: str, energy: str = "local") -> EnergyModel:
    return EnergyModel(
        tiny_family_model(model_type), energy=energy, mask_token_id=MASK, pad_token_id=0, special_token_ids=[0, 1, 2],
        excluded_token_ids=[3], prefix_token_ids=[1], suffix_token_ids=[2],
    )  # fmt: skip


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(6, 90, (3, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[:, 0] = 1
    ids[1, 9:], mask[1, 9:] = 0, 0
    ids[2, :2], mask[2, :2], ids[2, 2] = 0, 0, 1
    return ids, mask


def context_for(model: EnergyModel) -> dict:
    """What the model needs beside three rows of tokens."""
    if not model.mlm.config.is_encoder_decoder:
        return dict(NEEDED_INPUTS.get(model.mlm.config.model_type, {}))
    ids = torch.randint(6, 90, (3, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"encoder_input_ids": ids, "encoder_attention_mask": mask}


def of_row(context: dict, row: int) -> dict:
    """Of one row alone."""
    return {name: value[row : row + 1] if isinstance(value, torch.Tensor) else value for name, value in context.items()}


def source_of(context: dict, row: int) -> torch.Tensor | None:
    """A row's source, without padding."""
    if "encoder_input_ids" not in context:
        return None
    return context["encoder_input_ids"][row][context["encoder_attention_mask"][row].bool()]


def plain_inputs(model: EnergyModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the inner model needs beside `ids` (1, T)."""
    number = next(iter(NEEDED_INPUTS.get(model.mlm.config.model_type, {}).values()), None)
    values = {"langs": torch.full_like(ids, number or 0), "lang_ids": torch.tensor([number]) if number else None}
    values["bbox"] = torch.full((*ids.shape, 4), number or 0)
    return {name: values[name] for name in NEEDED_INPUTS.get(model.mlm.config.model_type, {})}


# Families whose last feed-forward network runs at every position: it is that of all layers, its linear layers are no
# `nn.Linear`, or what comes after it mixes positions.
WIDE = {"albert": {"feed-forward": False}, "ibert": {}, "squeezebert": {}, "perceiver": {"feed-forward": False}}


@torch.no_grad()
def plain_energy(model: EnergyModel, ids, context, positions=None) -> float:
    """One sequence, one masked position at a time, through the ordinary forward of a copy of the inner model."""
    mlm, total = copy.deepcopy(model.mlm), 0.0
    for position in range(len(ids)) if positions is None else positions:
        if int(ids[position]) in (0, 1, 2):
            continue
        masked = ids.clone()[None]
        masked[0, position] = MASK
        if context is None:
            logits = mlm(input_ids=masked, **plain_inputs(model, masked)).logits
        else:
            decoder_ids = mlm.prepare_decoder_input_ids_from_labels(masked)
            logits = mlm(input_ids=context[None], decoder_input_ids=decoder_ids).logits
        scores = logits[0, position]
        if model.config.energy == "local":
            scores = scores.log_softmax(-1)
        total -= float(scores[ids[position]])
    return total


@pytest.mark.parametrize("model_type", FAMILIES)
def test_energies_equal_one_position_at_a_time(model_type):
    model = wrap(model_type)
    ids, mask = ragged_batch()
    context = context_for(model)
    for energy in ENERGIES:
        model.config.energy = energy
        with torch.no_grad():
            found = model(ids, mask, **context)
        for row in range(3):
            expected = plain_energy(model, ids[row][mask[row].bool()], source_of(context, row))
            assert float(found.energy[row]) == pytest.approx(expected, abs=1e-4)
    # The head ran at one position a row, without encoder for all lengths at once; so did the last feed-forward network.
    verified = {key[0]: holds for key, holds in model.masked_batch_runner().position_logits._verified.items()}
    one_head = {} if "encoder_input_ids" in context else {"one head": True}
    assert verified == {"head": True, **one_head, **WIDE.get(model_type, {"feed-forward": True})}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_value_depends_on_what_ran_before(model_type):
    model = wrap(model_type)
    long = torch.randint(6, 90, (1, min(60, max_length(model.mlm) or 60)))
    short, context = long[:, :8], of_row(context_for(model), 1)
    free = torch.zeros_like(long)
    free[:, 3:6] = 1
    before = state_of(model.mlm)
    with torch.no_grad():
        energy = lambda model, ids: float(model(ids, None, free[:, : ids.shape[1]], **context).energy)  # noqa: E731
        fresh = [energy(copy.deepcopy(model), ids) for ids in (long, short)]
        found = [energy(model, ids) for ids in (long, short, long)]
    assert found == [*fresh, fresh[0]]
    assert fresh[0] == pytest.approx(plain_energy(model, long[0], source_of(context, 0), [3, 4, 5]), abs=1e-4)
    assert state_of(model.mlm) == before


def test_chains_of_a_long_prompt_are_the_same_beside_a_short_one():
    """BigBird's rows of 60 tokens are block-sparse, those of 8 aren't."""
    ids = torch.randint(6, 90, (2, 60), generator=torch.Generator().manual_seed(5))
    ids[:, 3:6] = MASK
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    settings = dict(num_chains=2, num_epochs=3, seed=0)
    alone = wrap("big_bird").generate(ids[1:], chain_rows=[0, 0], chain_keys=[(1, 0), (1, 1)], **settings)
    beside = wrap("big_bird").generate(ids, mask, **settings)
    assert torch.equal(beside.sequences[2:], alone.sequences)
    torch.testing.assert_close(beside.energies[2:], alone.energies, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_round_trip_is_bit_for_bit_and_samples(model_type, tmp_path):
    model = wrap(model_type, "raw")
    model.generation_config.num_epochs = 2
    model.save_pretrained(tmp_path)
    loaded = EnergyModel.from_pretrained(tmp_path).eval()
    saved = model.state_dict()
    assert saved.keys() == loaded.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in loaded.state_dict().items())
    assert loaded.config.energy == "raw"
    loaded.save_pretrained(tmp_path / "again")
    generation_config = (tmp_path / "generation_config.json").read_text()
    assert generation_config == (tmp_path / "again" / "generation_config.json").read_text()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "again")]
    for config in configs:  # Transformers writes the dtype into a nested configuration only after loading
        config["text_config"].pop("dtype", None)
    assert configs[0] == configs[1]
    settings = dict(lengths=4, num_chains=2, seed=0, **of_row(context_for(model), 0))
    ours, theirs = model.generate(**settings), loaded.generate(**settings)
    assert ours.trace.energy.shape == (2, 2)  # the setting that was saved
    assert torch.equal(ours.sequences, theirs.sequences)
    assert not torch.isin(ours.samples[:, :, 1:-1], torch.tensor([0, 1, 2, 3, MASK])).any()


@pytest.mark.parametrize("model_type", sorted(UNSUPPORTED_MODEL_TYPES))
def test_families_that_cannot_work_say_why(model_type, tmp_path):
    config = CONFIG_MAPPING[model_type]()
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{model_type}.*cannot be used: "):
        EnergyModel.from_pretrained(tmp_path)
