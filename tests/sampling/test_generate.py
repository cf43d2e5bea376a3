"""What `generate` promises: chains that depend on nothing but seed and number, every option, every refusal."""

import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.utils import logging

from hf_ebm import ChainGenerationConfig, EnergyModel, TextEnergy
from hf_ebm.scoring.head import PositionLogits
from tests.conftest import tiny_energy_model
from tests.sampling.chains import BASE, VARIED, StopAfter, equal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("extra", VARIED)
def test_chains_depend_on_nothing_beside_them(extra):
    model = tiny_energy_model()
    settings = BASE | extra
    together = model.generate(**settings)
    assert equal(together, model.generate(**settings))
    assert equal(together, model.generate(**settings, token_budget=9))
    for row, key in enumerate(zip(together.prompt_indices.tolist(), together.chain_indices.tolist(), strict=True)):
        alone = model.generate(**settings, chain_keys=[key])
        attended = together.attention_mask[row].bool()
        assert torch.equal(alone.samples[0][:, alone.attention_mask[0].bool()], together.samples[row][:, attended])
        torch.testing.assert_close(alone.energies[0], together.energies[row], rtol=1e-5, atol=1e-5)


def test_more_chains_leave_the_first_ones_alone_and_seeds_matter():
    model = tiny_energy_model()
    few, many = model.generate(**BASE), model.generate(**BASE | {"num_chains": 8})
    assert torch.equal(few.samples, many.samples[:3])
    assert not torch.equal(few.samples, model.generate(**BASE | {"seed": 8}).samples)
    torch.manual_seed(0)
    drawn = model.generate(**BASE | {"seed": None})
    torch.manual_seed(0)
    assert drawn.seed == model.generate(**BASE | {"seed": None}).seed


def test_threads_may_share_a_model():
    """Chains, energies and counts of rows are those of one thread, though hooks are put on the same modules."""
    model = tiny_energy_model(layers=2)
    texts = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 5, 6, 2]])
    model.generate(**BASE), model.score_ids(texts)  # before any thread, so that none of them checks the forward
    alone, energies = [model.generate(**BASE | {"seed": seed}) for seed in range(4)], model.score_ids(texts)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(model.generate, **BASE | {"seed": seed}) for seed in range(4)]
            scores = [pool.submit(model.score_ids, texts) for _ in range(8)]
            for expected, run in zip(alone, runs, strict=True):
                assert torch.equal(run.result().samples, expected.samples)
                assert run.result().num_masked_rows == expected.num_masked_rows
            for score in scores:
                torch.testing.assert_close(score.result(), energies, atol=1e-5, rtol=1e-5)
    finally:
        sys.setswitchinterval(interval)


def test_settings_save_with_the_model_and_load_back(tmp_path):
    model = tiny_energy_model()
    model.generation_config = ChainGenerationConfig(
        kernel="metropolis_hastings", lengths={3: 0.25, 4: 0.75}, num_chains=2, num_epochs=5, burn_in=1, thinning=2,
        seed=3, block_size=3, final_block_size=1, block_fill="sequential", block_layout="contiguous",
        order="sequential", energy_temperature=1.5, energy_temperature_decay=0.1, min_energy_temperature=0.9,
        replica_temperatures=[1, 1.5],
        proposal_temperature=1.2, proposal_top_k=3, proposal_top_p=0.9, proposal_epsilon=0.05, exclude_current=True,
        delayed_acceptance=1, warm_start="greedy", accept_all_epochs=1, suppress_tokens=[8],
        allowed_tokens={2: [5, 6]}, avoid=[[1, 5, 5, 5, 2]], min_distance=2,
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    loaded = EnergyModel.from_pretrained(tmp_path)
    assert loaded.generation_config.settings() == model.generation_config.settings()
    assert None not in (getattr(model.generation_config, name) for name in model.generation_config.settings())
    elsewhere = {"decoder", "max_changes", "protected_positions", "target_rhat", "max_rows"}  # don't go with these
    assert model.generation_config.settings().keys() == ChainGenerationConfig.defaults.keys() - elsewhere
    out = loaded.generate()
    assert equal(out, model.generate()) and 8 not in out.samples
    assert out.trace.block_size[0].tolist() == [3, 2, 2, 2, 1]
    assert out.trace.temperature[0].tolist() == pytest.approx([1.5, 1.4, 1.3, 1.2, 1.1])
    assert out.kept_epochs == (1, 3)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(saved | {"beam_size": 4}))
    with pytest.raises(ValueError, match="unknown generation settings: beam_size"):
        EnergyModel.from_pretrained(tmp_path)


def test_where_chains_start_and_what_stays_fixed():
    """Without masks every word is free and the chain starts at the text; [UNK] is filled; fixed words stay."""
    model = tiny_energy_model()
    text = torch.tensor([[1, 5, 6, 7, 8, 2]])
    nearly = model.generate(input_ids=text, num_chains=40, num_epochs=1, proposal_temperature=1e-3, seed=0,
                            stopping_criteria=[StopAfter(1)], free_mask=torch.tensor([[0, 0, 1, 0, 0, 0]]))  # fmt: skip
    assert (nearly.sequences[:, [0, 1, 3, 4, 5]] == text[:, [0, 1, 3, 4, 5]]).all()
    unknown = model.generate(input_ids=torch.tensor([[1, 5, 4, 7, 2]]), num_chains=20, num_epochs=1, seed=0)
    assert not torch.isin(unknown.samples[..., 1:-1], torch.tensor([0, 1, 2, 3, 4])).any()
    left_padded = model.generate(
        input_ids=torch.tensor([[0, 0, 1, 3, 6, 2]]), attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]), seed=1
    )
    plain = model.generate(input_ids=torch.tensor([[1, 3, 6, 2]]), seed=1)
    assert torch.equal(left_padded.samples[..., 2:], plain.samples)
    torch.testing.assert_close(left_padded.energies, plain.energies)


def test_rejected_chains_are_unchanged_and_huge_differences_do_not_overflow():
    """Extra energies of thousands of nats: no NaN, and a chain that may not move is bit for bit where it was."""
    model = tiny_energy_model()
    start = torch.tensor([[1, 5, 6, 7, 8, 2]])

    def far_away(ids):
        return 5_000.0 * (ids != start).sum(1).double()

    out = model.generate(input_ids=start, num_chains=8, num_epochs=3, seed=0, extra_energies=[(1.0, far_away)])
    assert (out.samples == start).all() and out.energies.isfinite().all()
    assert float(out.trace.novel_rate.max()) == 0.0 and float(out.trace.acceptance_rate.max()) < 1.0
    pull = model.generate(input_ids=start, num_chains=8, num_epochs=60, seed=0, extra_energies=[(-1.0, far_away)])
    assert ((pull.sequences != start).sum(1) == 4).all()


def test_hard_constraint_from_outside_is_entered_and_never_left():
    model = tiny_energy_model()

    def keyword(ids):
        return torch.where((ids == 8).any(1), 0.0, torch.inf).double()

    out = model.generate(
        input_ids=torch.tensor([[1, 5, 5, 5, 2]]), num_chains=50, num_epochs=30, seed=0, extra_energies=[(1.0, keyword)]
    )
    has = (out.samples == 8).any(2)
    assert has[:, -1].all() and not has[:, 0].all()
    assert (has[:, 1:] | ~has[:, :-1]).all()
    assert (out.energies.isinf() == ~has).all() and torch.equal(out.satisfied, has)


@pytest.fixture
def warnings(caplog):
    """What the library has warned of."""
    logging.enable_propagation()
    with caplog.at_level("WARNING"):
        yield caplog
    logging.disable_propagation()


def test_a_constraint_that_is_never_met_is_told(warnings):
    never = lambda ids: torch.full((len(ids),), torch.inf)  # noqa: E731
    out = tiny_energy_model().generate(**BASE, extra_energies=never)
    assert not out.satisfied.any() and len(out.samples)
    assert [
        message for message in warnings.messages if message.startswith("3 of 3 chains have samples of infinite energy")
    ]
    assert tiny_energy_model().generate(**BASE).satisfied.all() and len(warnings.messages) == 1


def test_a_constraint_goes_with_finite_terms_behind_it():
    keyword = lambda ids: torch.where((ids == 8).any(1), 0.0, torch.inf)  # noqa: E731
    fives = lambda ids: (ids == 5).sum(1).double()  # noqa: E731
    prompt, settings = torch.tensor([[1, 5, 5, 5, 2]]), dict(num_chains=8, num_epochs=5, seed=0)
    outputs = [
        tiny_energy_model().generate(prompt, **settings, extra_energies=terms)
        for terms in ([keyword, fives], [fives, keyword])
    ]
    assert not outputs[0].satisfied.all() and torch.equal(outputs[0].samples, outputs[1].samples)


def test_a_run_that_ends_before_a_sample_is_kept_says_so(warnings):
    out = tiny_energy_model().generate(**BASE | {"num_epochs": 9, "burn_in": 4}, stopping_criteria=StopAfter(2))
    assert out.samples.shape[1] == 0
    assert warnings.messages == ["No sample was kept: the run ended after epoch 2, burn_in is 4."]


@pytest.mark.parametrize("bad", [lambda ids: ids.float(), lambda ids: torch.full((len(ids),), float("nan"))])
def test_extra_energies_are_checked(bad):
    with pytest.raises(ValueError, match=r"extra_energies: entry 0 .* returned"):
        tiny_energy_model().generate(**BASE, extra_energies=[(1.0, bad)])


def test_text_energy_adapts_functions_of_texts():
    class Decoder:
        def batch_decode(self, ids, skip_special_tokens):
            assert skip_special_tokens
            return [" ".join(map(str, row.tolist())) for row in ids]

    energy = TextEnergy(lambda texts: [float(text.count("5")) for text in texts], Decoder())
    assert energy(torch.tensor([[1, 5, 5, 2], [1, 6, 7, 2]])).tolist() == [2.0, 0.0]


class SeesNoCurrentTokens(LogitsProcessor):
    """Records what a processor is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.clone())
        scores[:, 5] -= 1.0  # in place, as some processors do
        return scores


def test_processors_see_the_masked_sequence_and_may_work_in_place():
    from tests.sampling.oracle import exact_target, total_variation_limit

    model = tiny_energy_model()
    processor = SeesNoCurrentTokens()
    out = model.generate(lengths=3, num_chains=1000, num_epochs=12, seed=0,
                         logits_processor=LogitsProcessorList([processor]))  # fmt: skip
    assert all((ids == 3).any(1).all() for ids in processor.seen)
    exact = exact_target(model, [5, 6, 7, 8], 3)
    assert exact.total_variation(out.sequences[:, 1:-1]) < total_variation_limit(exact.log_probabilities.exp(), 1000)


def test_streamer_sees_accepted_changes():
    class Streamer:
        def __init__(self):
            self.first, self.drafts, self.ended = None, [], False

        def put(self, value):
            self.first = value

        def put_draft(self, value):
            self.drafts.append(value)

        def end(self):
            self.ended = True

    streamer = Streamer()
    out = tiny_energy_model().generate(**BASE, streamer=streamer)
    states = [streamer.first, *streamer.drafts]
    assert streamer.ended and torch.equal(states[-1], out.sequences)
    assert all((a != b).any() for a, b in itertools.pairwise(states))
    assert sum(int((a != b).sum()) for a, b in itertools.pairwise(states)) == int(out.trace.tokens_changed.sum())


def test_stopping_criteria_end_the_run_early():
    out = tiny_energy_model().generate(**BASE, stopping_criteria=[StopAfter(2)])
    assert out.trace.energy.shape == (3, 2) and out.samples.shape[1] == 2 and out.kept_epochs == (0, 1)


def test_a_truncated_proposal_that_sticks_is_warned_about(caplog):
    model = tiny_energy_model()
    logging.warning_once.cache_clear()  # another test may have raised it
    logging.enable_propagation()
    with caplog.at_level("WARNING"):
        model.generate(input_ids=torch.tensor([[1, 5, 6, 7, 8, 2]]), num_chains=30, num_epochs=3, proposal_top_k=2,
                       proposal_epsilon=0.0, seed=0)  # fmt: skip
    logging.disable_propagation()
    assert sum("truncated proposal" in record.message for record in caplog.records) == 1


def test_accept_all_epochs_only_initialise():
    out = tiny_energy_model().generate(**BASE | {"num_epochs": 5, "accept_all_epochs": 2, "burn_in": 2})
    assert (out.trace.acceptance_rate[:, :2] == 1).all()
    model = tiny_energy_model()
    for energies, ids in zip(out.energies.T, out.samples.transpose(0, 1), strict=True):
        torch.testing.assert_close(energies, model(ids).energy.double(), rtol=1e-5, atol=1e-4)


def test_no_autograd_graph_and_training_mode_is_restored():
    model = tiny_energy_model(hidden_dropout_prob=0.2).train()
    out = model.generate(**BASE)
    assert model.training and model.mlm.training
    assert not out.energies.requires_grad and not out.trace.energy.requires_grad
    assert equal(out, model.eval().generate(**BASE))


def test_mask_predict_by_hand():
    """n (N - t) / N least confident positions are masked anew; checked against a plain re-implementation."""
    model = tiny_energy_model(seed=4)
    out = model.generate(lengths=4, num_epochs=3, decoder="mask_predict", seed=0)
    ids, confidence = torch.tensor([1, 3, 3, 3, 3, 2]), torch.full((6,), torch.inf)
    confidence[1:5] = -torch.inf
    for iteration in range(3):
        again = confidence.argsort(stable=True)[: 4 * (3 - iteration) // 3]
        ids[again] = 3
        logits = model.mlm(input_ids=ids[None]).logits[0].detach()
        logits[:, [0, 1, 2, 3, 4]] = -torch.inf
        best = logits.log_softmax(-1).max(-1)
        ids[again], confidence[again] = best.indices[again], best.values[again]
    assert out.sequences[0].tolist() == ids.tolist()
    assert float(out.mean_log_probabilities) == pytest.approx(float(confidence[1:5].mean()), abs=1e-5)
    torch.testing.assert_close(out.energies[:, 0], model(ids[None]).energy.double(), rtol=1e-5, atol=1e-4)


def test_inference_data_has_one_prompt_a_column():
    model = tiny_energy_model()
    out = model.generate(**BASE | {"lengths": [2, 4], "num_epochs": 6, "burn_in": 1})
    data = out.to_inference_data()
    assert dict(data.posterior.energy.sizes) == {"chain": 3, "draw": 5, "prompt": 2}
    expected = out.energies[out.prompt_indices == 1]
    assert (data.posterior.energy.sel(prompt=1).values == expected.numpy()).all()
    assert "acceptance_rate" in data.sample_stats
    with pytest.raises(ValueError, match="same number of chains"):
        model.generate(**BASE | {"lengths": [2, 4]}, chain_keys=[(0, 0), (0, 1), (1, 0)]).to_inference_data()


def test_r_hat_tells_mixed_from_stuck_chains():
    import arviz

    def two_valleys(ids):
        return 12.0 * torch.minimum((ids[:, 1:-1] != 5).sum(1), (ids[:, 1:-1] != 8).sum(1)).double()

    model = tiny_energy_model()
    settings = dict(lengths=4, num_chains=8, num_epochs=60, burn_in=10, seed=0)
    mixed, stuck = model.generate(**settings), model.generate(**settings, extra_energies=[(1.0, two_valleys)])
    r_hat = [float(arviz.rhat(out.to_inference_data(), method="split").energy.values[0]) for out in (mixed, stuck)]
    assert r_hat[0] < 1.1 < r_hat[1]


def test_lengths_are_drawn_from_their_distribution():
    out = tiny_energy_model().generate(lengths={2: 0.25, 3: 0.75, 6: 0.0}, num_chains=400, num_epochs=1, seed=0)
    drawn = out.attention_mask.sum(1) - 2
    assert set(drawn.tolist()) == {2, 3}
    assert float((drawn == 2).double().mean()) == pytest.approx(0.25, abs=0.07)


@pytest.mark.parametrize("extra", [{}, {"decoder": "mask_predict"}, {"warm_start": "greedy"}])
def test_padding_may_hold_anything(extra):
    """Ids outside the vocabulary, the mask id, or no pad token at all: padding is never read and never returned so."""
    model = tiny_energy_model()
    ids, mask = torch.tensor([[1, 3, 5, 2, -100], [1, 3, 3, 5, 2]]), torch.tensor([[1, 1, 1, 1, 0], [1] * 5])
    expected = model.generate(ids.clamp(min=0), mask, seed=0, **extra)
    assert equal(expected, model.generate(ids, mask, seed=0, **extra))
    assert equal(expected, model.generate(ids.masked_fill(mask == 0, 3), mask, seed=0, **extra))
    model.config.pad_token_id = None
    ragged = model.generate(lengths=[2, 4], seed=0)
    assert 3 not in ragged.samples


def test_bad_logits_name_prompt_and_chain(monkeypatch):
    model = tiny_energy_model()
    together = PositionLogits.together

    def spoiled(self, passes):
        bad_rows = [(one.input_ids == 8).any(1)[:, None, None] for one in passes]
        pairs = zip(together(self, passes), bad_rows, strict=True)
        return [logits.masked_fill(rows, torch.nan) for logits, rows in pairs]

    monkeypatch.setattr(PositionLogits, "together", spoiled)
    prompts = torch.tensor([[1, 5, 6, 6, 2], [1, 6, 3, 3, 2], [1, 8, 3, 3, 2]])
    with pytest.raises(ValueError, match="NaN or infinite logits for prompt 2, chain 0: row 4, position"):
        model.generate(prompts, num_chains=2, num_epochs=2, seed=0, suppress_tokens=[8])


def test_stopping_remembers_which_chains_were_done():
    class FirstTokenIsFive(StoppingCriteria):
        def __call__(self, input_ids, scores):
            return input_ids[:, 1] == 5

    model = tiny_energy_model()
    settings = dict(lengths=3, num_epochs=40, seed=0, stopping_criteria=[FirstTokenIsFive()])
    alone = [model.generate(**settings, chain_keys=[(0, chain)]).trace.energy.shape[1] for chain in range(4)]
    assert model.generate(**settings, num_chains=4).trace.energy.shape[1] == max(alone) < 40


def test_module_modes_come_back_as_they_were():
    model = tiny_energy_model().train()
    model.mlm.bert.eval()
    model.generate(**BASE)
    assert model.mlm.training and not model.mlm.bert.training
    model.eval()
    model.mlm.train()
    model.score_ids(torch.tensor([[1, 5, 2]]))
    assert model.mlm.training and not model.training


def test_a_weight_of_zero_switches_a_term_off():
    def forbidden(ids):
        return torch.full((len(ids),), torch.inf)

    model = tiny_energy_model()
    assert equal(model.generate(**BASE), model.generate(**BASE, extra_energies=[(0.0, forbidden)]))


def test_a_decoder_under_its_old_name_warns_and_decodes():
    model, settings = tiny_energy_model(vocab_size=12), dict(lengths=4, num_epochs=3, seed=0)
    expected = model.generate(decoder="mask_predict", **settings)
    with pytest.warns(FutureWarning, match="decoder='mask_predict'"):
        found = model.generate(kernel="mask_predict", **settings)
    assert equal(found, expected) and found.run.run_config == expected.run.run_config
    with pytest.warns(FutureWarning, match="decoder='mask_predict'"):
        assert ChainGenerationConfig(kernel="mask_predict").settings()["decoder"] == "mask_predict"


def test_a_kernel_and_a_decoder_clear_each_other():
    """What a call says goes over what a configuration says, which goes over the model's settings."""
    model = tiny_energy_model(vocab_size=12)
    chain, gibbs = {"kernel": "metropolis_hastings"}, {"kernel": "gibbs"}
    decoder = {"decoder": "mask_predict"}
    for layers, kernel, decodes in (
        ([decoder, {}, {}], "metropolis_hastings", True),
        ([decoder, chain, {}], "metropolis_hastings", False),
        ([decoder, {}, chain], "metropolis_hastings", False),
        ([decoder, {}, gibbs], "gibbs", False),
        ([gibbs, decoder, {}], "metropolis_hastings", True),
        ([chain, gibbs, decoder], "metropolis_hastings", True),
        ([decoder, gibbs, decoder], "metropolis_hastings", True),
    ):
        own, config, call = layers
        model.generation_config = ChainGenerationConfig(**own)
        found = ChainGenerationConfig(**config).resolved(model.generation_config, call)
        assert (found.kernel, found.decoder) == (kernel, "mask_predict" if decodes else None)
        out = model.generate(lengths=3, num_epochs=2, generation_config=ChainGenerationConfig(**config), **call)
        assert (out.mean_log_probabilities is not None) == decodes
    with pytest.raises(ValueError, match="kernel has no effect with decoder 'mask_predict'"):
        ChainGenerationConfig(kernel="gibbs", decoder="mask_predict")
