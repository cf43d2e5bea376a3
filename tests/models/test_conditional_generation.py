"""`generate_from_sources` against enumeration, for a source in the same row and for one in the encoder."""

import copy

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2ForSequenceClassification

from hf_ebm import EnergyModel, enumerate_distribution
from hf_ebm.data.symbols import symbol_tokenizer
from hf_ebm.models.energy import length_log_probs
from hf_ebm.models.energy.configuration_energy import token_roles
from tests.conftest import tiny_mlm
from tests.sampling.oracle import total_variation_limit

CHAINS = 1200
SOURCES = ["a b", "b a a"]


@pytest.fixture(scope="module")
def tokenizer():
    return symbol_tokenizer(["X Y Z"], ["a b"], model_max_length=24, masks=True)  # 5 to 7 are targets' symbols


def model_for(tokenizer, kind: str, energy: str = "local") -> EnergyModel:
    if kind == "masked":
        mlm = tiny_mlm(len(tokenizer))
    else:
        torch.manual_seed(1)
        mlm = BartForConditionalGeneration(
            BartConfig(
                vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=24,
                pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, dropout=0.0,
            )
        ).eval()  # fmt: skip
        for parameter in mlm.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3)
    return EnergyModel(mlm, energy=energy, **token_roles(tokenizer, len(tokenizer)))


@pytest.fixture(scope="module")
def length_model(tokenizer):
    torch.manual_seed(2)
    return GPT2ForSequenceClassification(
        GPT2Config(
            vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=24, num_labels=5, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, initializer_range=0.8,
        )
    ).eval()  # fmt: skip


def exact(model, tokenizer, source: str, length: int):
    """The distribution of targets, from the model's own logits, one masked position at a time."""
    source_ids = tokenizer(source)["input_ids"]

    def energy(targets):
        total = torch.zeros(len(targets), dtype=torch.float64)
        for place in range(length):
            rows = targets.clone()
            rows[:, place] = tokenizer.mask_token_id
            ends = torch.full((len(rows), 1), tokenizer.eos_token_id)
            context = torch.tensor([source_ids]).expand(len(rows), -1)
            if model.mlm.config.is_encoder_decoder:
                shifted = torch.cat([ends, rows], 1)  # the decoder starts from </s> and reads one place behind
                logits = model.mlm(input_ids=context, decoder_input_ids=shifted).logits[:, place]
            else:
                row = torch.cat([context, rows, ends], 1)
                logits = model.mlm(input_ids=row).logits[:, context.shape[1] + place]
            scores = logits if model.config.energy == "raw" else logits.log_softmax(-1)
            total -= scores.gather(1, targets[:, place : place + 1])[:, 0].double()
        return total

    return enumerate_distribution(energy, [5, 6, 7], length)


@pytest.mark.parametrize("kind", ["masked", "encoder_decoder"])
def test_targets_of_given_lengths_reach_the_exact_distribution(tokenizer, kind, energy):
    model = model_for(tokenizer, kind, energy)
    assert model.config.excluded_token_ids == [3, 8, 9]  # <unk>, and the symbols that sources alone have
    out = model.generate_from_sources(SOURCES, tokenizer, lengths=[3, 2], num_chains=CHAINS, num_epochs=10, seed=0)
    distances = []
    for source, texts, length in zip(SOURCES, out.texts, (3, 2), strict=True):
        truth = exact(model, tokenizer, source, length)
        found = torch.tensor([tokenizer.convert_tokens_to_ids(text.split()) for text in texts])
        assert truth.total_variation(found) < total_variation_limit(truth.log_probabilities.exp(), CHAINS)
        other = exact(model, tokenizer, SOURCES[1 - SOURCES.index(source)], length)
        distances.append(other.total_variation(found) > total_variation_limit(other.log_probabilities.exp(), CHAINS))
        index = truth.index(found)
        torch.testing.assert_close(truth.energy[index], out.energies[SOURCES.index(source)], rtol=1e-4, atol=1e-4)
    assert any(distances)  # the source matters: the test would see another one's


@pytest.mark.parametrize("kind", ["masked", "encoder_decoder"])
def test_drawn_lengths_follow_the_length_model(tokenizer, length_model, kind):
    model = model_for(tokenizer, kind)
    how = dict(lengths="sample", length_model=length_model, num_epochs=1, seed=3)
    out = model.generate_from_sources(SOURCES, tokenizer, num_chains=500, **how)
    for row, source in enumerate(SOURCES):
        with torch.no_grad():
            logits = length_model(**tokenizer(source, return_tensors="pt")).logits[0, 1:]
        expected = logits.double().softmax(-1)
        found = torch.bincount(out.lengths[row] - 1, minlength=4) / 500
        assert (expected.max() - expected.min()) > 0.1
        assert bool(((found - expected).abs() < 4 * (expected * (1 - expected) / 500).sqrt()).all())
        torch.testing.assert_close(length_log_probs(length_model, tokenizer, SOURCES)[row].exp(), expected)
    assert [[len(text.split()) for text in own] for own in out.texts] == out.lengths.tolist()


def test_a_chain_is_the_same_whatever_runs_beside_it(tokenizer, length_model):
    model = model_for(tokenizer, "masked")
    for lengths in ("sample", "energy"):
        how = dict(lengths=lengths, length_model=length_model, num_epochs=3, seed=3)
        many = model.generate_from_sources(SOURCES, tokenizer, num_chains=6, **how)
        few = model.generate_from_sources(SOURCES[:1], tokenizer, num_chains=2, **how)
        assert few.texts[0] == many.texts[0][:2]
        torch.testing.assert_close(few.energies[0], many.energies[0, :2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sampler",
    [{}, {"replica_temperatures": [1.0, 1.5]}, {"decoder": "mask_predict"}],
    ids=["chains", "replicas", "fill"],
)
def test_the_length_of_least_energy_and_most_probability_is_chosen(tokenizer, length_model, sampler):
    model = model_for(tokenizer, "masked")
    how = dict(lengths="energy", length_model=length_model, num_lengths=3, num_chains=4, seed=1, **sampler)
    out = model.generate_from_sources(SOURCES, tokenizer, num_epochs=2, **how)
    best = length_log_probs(length_model, tokenizer, SOURCES).topk(3)
    log_probs, best = best.values, best.indices + 1
    competing = out.chains.run.free[:24].sum(1).view(2, 4, 3)
    assert all(torch.equal(competing[row, chain], best[row]) for row in range(2) for chain in range(4))
    each = out.chains.energies[:, -1].view(2, 4, 3)
    assert torch.equal((each - log_probs[:, None]).argmin(-1), out.rows - 3 * torch.arange(8).view(2, 4))
    assert torch.equal(each.flatten()[out.rows], out.energies)


@pytest.mark.parametrize("kind", ["masked", "encoder_decoder"])
def test_the_most_probable_pair_of_length_and_target_is_chosen(tokenizer, length_model, kind):
    """The target has 3 nats less for each symbol, which log Z takes back."""
    model = model_for(tokenizer, kind, "raw")
    prize = lambda ids: -3.0 * torch.isin(ids, torch.tensor([5, 6, 7])).sum(1)  # noqa: E731
    how = dict(length_model=length_model, num_lengths=3, num_chains=2, num_epochs=2, seed=1, extra_energies=prize)
    out = model.generate_from_sources(SOURCES, tokenizer, lengths="probability", num_particles=100, **how)
    lengths = out.chains.run.free.sum(1).view(2, 2, 3)
    log_probs = length_log_probs(length_model, tokenizer, SOURCES).view(2, 1, 4).expand(2, 2, 4).gather(2, lengths - 1)
    exact_log_z = [exact(model, tokenizer, source, n).log_partition for source in SOURCES for n in range(1, 5)]
    log_z = torch.stack(exact_log_z).view(2, 1, 4).expand(2, 2, 4).gather(2, lengths - 1) + 3 * lengths
    merit = log_probs - out.chains.energies[:, -1].view(2, 2, 3) - log_z
    chosen = merit.argmax(-1)
    assert torch.equal(chosen, out.rows - 3 * torch.arange(4).view(2, 2))
    torch.testing.assert_close(out.log_partition, log_z.gather(2, chosen[..., None])[..., 0], atol=0.2, rtol=0)
    other = model.generate_from_sources(SOURCES, tokenizer, lengths="energy", **how)
    assert torch.equal(other.chains.samples, out.chains.samples) and not torch.equal(other.rows, out.rows)


def test_a_length_of_which_nothing_may_be_is_not_chosen(tokenizer, length_model):
    """Its Z is 0, and the energies of its chains are infinite."""
    model, forbidden = model_for(tokenizer, "masked"), []

    def rule(ids):
        symbols = torch.isin(ids, torch.tensor([5, 6, 7])).sum(1)
        return torch.where(torch.isin(symbols, torch.tensor(forbidden).long()), torch.inf, 0.0)

    model.generation_config.kernel = "gibbs"  # of the model, which the call's takes the place of
    how = dict(lengths="probability", length_model=length_model, num_lengths=3, num_particles=8, num_epochs=2, seed=1)
    how["kernel"] = "metropolis_hastings"
    first = model.generate_from_sources(SOURCES[:1], tokenizer, extra_energies=rule, **how)
    forbidden.append(int(first.lengths))
    second = model.generate_from_sources(SOURCES[:1], tokenizer, extra_energies=rule, **how)
    assert int(second.lengths) not in forbidden and float(second.log_partition.abs()) < torch.inf


def test_settings_of_the_model_and_of_generate_hold(tokenizer):
    model = model_for(tokenizer, "masked")
    model.generation_config.num_chains, model.generation_config.lengths = 3, 7
    seen = []
    out = model.generate_from_sources(
        SOURCES, tokenizer, lengths=[2, 2], num_epochs=2, suppress_tokens=[5, 6],
        extra_energies=[(1.0, lambda ids: seen.append(ids) or torch.zeros(len(ids)))],
    )  # fmt: skip
    assert seen
    assert out.texts == [["Z Z"] * 3] * 2
    assert (model.generation_config.num_chains, model.generation_config.lengths) == (3, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(sources=[]), "sources must hold"),
        (dict(lengths=[2]), "lengths must be 2 whole numbers"),
        (dict(lengths=[2, 0]), "lengths must be 2 whole numbers"),
        (dict(lengths="longest"), '"energy" or "probability", got \'longest\''),
        (dict(lengths="probability"), "length_model must be"),
        (dict(lengths="probability", length_model="given", num_particles=1), "num_particles"),
        (dict(lengths="sample"), "length_model must be"),
        (dict(length_model="given"), "length_model was given together"),
        (dict(lengths="energy", length_model="given", num_lengths=5), "num_lengths must be from 1 to .* 4, got 5"),
        (dict(sources=["a <mask>", "b"]), "row 0 holds the special token '<mask>'"),
        (dict(sources=["a " * 40, "b"]), "sources: row 0 has 43 tokens"),
        (
            dict(lengths=[2, 40]),
            "40 tokens for row 1, .* room for 19: the tokenizer allows 24",
        ),
        (dict(lengths={2: 0.5, 3: 0.5}), "lengths must be 2 whole numbers"),
        (dict(sources=["a </s>", "b"]), "row 0 holds the special token '</s>'"),
        (dict(lengths="sample", length_model="x"), "length_model must be a sequence classifier .* got str"),
        (dict(lengths="sample", length_model="given", block_size=2), "block_size 2 may be above a length"),
        (dict(sources=["a", "b \ud800"]), "sources: row 1 holds half of a surrogate pair"),
        (dict(generation_config={}), "generation_config must be a ChainGenerationConfig, got dict"),
        (dict(input_ids=torch.zeros(1, 2)), "input_ids has no place"),
        (dict(chain_keys=[(0, 0)]), "chain_keys has no place"),
        (dict(num_epoch=3), "num_epoch"),
    ],
)
def test_bad_input_is_refused_before_any_work(tokenizer, length_model, change, message):
    model = model_for(tokenizer, "masked")
    given = {"sources": SOURCES, "lengths": [2, 2], **change}
    if given.get("length_model") == "given":
        given["length_model"] = length_model
    sources = given.pop("sources")
    with pytest.raises((ValueError, TypeError), match=message):
        model.generate_from_sources(sources, tokenizer, num_epochs=1, **given)


def test_another_tokenizer_is_refused(tokenizer):
    model = model_for(tokenizer, "masked")
    with pytest.raises(ValueError, match="must have a mask token"):
        model.generate_from_sources(SOURCES, symbol_tokenizer(["X"], ["a"]), lengths=[1, 1])
    model.config.mask_token_id = 7
    with pytest.raises(ValueError, match="its mask token has id 4, the model's is 7"):
        model.generate_from_sources(SOURCES, tokenizer, lengths=[1, 1])


def test_chains_of_one_prompt_may_start_from_different_rows(tokenizer):
    model = model_for(tokenizer, "masked")
    rows = torch.tensor([[8, 2, 4, 2, 0], [8, 2, 4, 4, 2]])
    mask = (rows != 0).long()
    out = model.generate(input_ids=rows, attention_mask=mask, chain_keys=[(7, 0), (7, 1)], chain_rows=[1, 0], seed=0)
    assert out.prompt_indices.tolist() == [7, 7] and out.attention_mask.sum(1).tolist() == [5, 4]
    for wrong in ([0], [0, 2], [0, -1], [0, True]):
        with pytest.raises(ValueError, match="chain_rows must be 2 numbers of rows from 0 to 1"):
            model.generate(input_ids=rows, attention_mask=mask, chain_keys=[(0, 0), (0, 1)], chain_rows=wrong)
    with pytest.raises(ValueError, match="without chain_keys and input_ids"):
        model.generate(input_ids=rows, attention_mask=mask, chain_rows=[0])
    with pytest.raises(ValueError, match="different pairs"):
        model.generate(input_ids=rows, attention_mask=mask, chain_keys=[(0, 0), (0, 0)], chain_rows=[0, 1])


def test_sources_too_long_for_the_length_model_are_refused(tokenizer, length_model):
    with pytest.raises(ValueError, match="row 1 has 31 tokens, length_model has positions for 24"):
        length_log_probs(length_model, tokenizer, ["a", "a " * 30])


def test_a_sources_lengths_do_not_depend_on_what_stands_beside_it(tokenizer, length_model):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "left"
    alone = length_log_probs(length_model, tokenizer, ["a"])
    beside = length_log_probs(length_model, tokenizer, ["b a b a", "a", "b b"])
    torch.testing.assert_close(beside[1], alone[0], rtol=1e-5, atol=1e-6)


def test_a_length_model_of_nans_is_refused(tokenizer, length_model):
    broken = copy.deepcopy(length_model)
    broken.score.weight.data.fill_(float("nan"))
    for lengths in ("sample", "energy"):
        with pytest.raises(ValueError, match=r"length_model gives .*source of row 0"):
            model_for(tokenizer, "masked").generate_from_sources(
                SOURCES, tokenizer, lengths=lengths, length_model=broken
            )


def test_no_length_is_drawn_that_the_model_has_no_positions_for(tokenizer, length_model):
    model = EnergyModel(
        tiny_mlm(len(tokenizer), max_position_embeddings=6), **token_roles(tokenizer, len(tokenizer))
    )  # "b a a" and two ends leave room for one or two tokens
    how = dict(length_model=length_model, num_chains=100, num_epochs=1, seed=0)
    out = model.generate_from_sources(SOURCES, tokenizer, lengths="sample", **how)
    assert int(out.lengths[0].max()) == 2 and int(out.lengths[1].max()) == 1
    with pytest.raises(ValueError, match="num_lengths is 3, with row 0 there is room for 2: the "):
        model.generate_from_sources(SOURCES, tokenizer, lengths="energy", **how)
