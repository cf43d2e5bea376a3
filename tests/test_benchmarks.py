"""What the benchmarks compare with, the measure of mixing, and the parts of what runs on a card."""

import io
import json
import math
import os
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from benchmarks import candidates, design, gpu, mixing, mixing_targets, pair_joints
from benchmarks.gradient_samplers import DiscreteLangevin, GibbsWithGradients, state_at, step
from benchmarks.loops import CarefulLoop, PlainLoop
from benchmarks.mixing_measures import over_chains, reference_of, rows_to, tokens_kept
from benchmarks.mixing_samplers import SAMPLERS
from hf_ebm import EnergyModel
from hf_ebm.lattices import ising, potts
from hf_ebm.models.energy.configuration_energy import token_roles
from tests.conftest import plain_token_energies, tiny_energy_model
from tests.sampling.oracle import total_variation_limit


@pytest.mark.parametrize("loop", [PlainLoop, CarefulLoop])
def test_a_loop_returns_states_with_their_energies(loop):
    model = tiny_energy_model()
    support = torch.arange(9) > 4
    start = torch.tensor([[1, 5, 5, 5, 2]]).repeat(4, 1)
    program = loop(model.mlm, model.config.mask_token_id, 3, support, seed=0)
    energies, states, changed = program.run(start, row_budget=4 * 3 * 7 * 5)
    assert energies.shape == states.shape[:2] and states.shape[0] == 4
    assert changed >= int((states[:, 1:] != states[:, :-1]).sum()) > 0
    for chain, epoch in ((0, 0), (1, 2), (3, -1)):
        expected = sum(plain_token_energies(model, states[chain, epoch], [1, 2, 3]))
        assert float(energies[chain, epoch]) == pytest.approx(expected, abs=1e-4)


def test_tokens_kept():
    generator = torch.Generator().manual_seed(0)
    fresh = torch.randint(50, (8, 400, 6), generator=generator)
    frozen = fresh[:, :1].expand(-1, 400, -1)
    assert tokens_kept(frozen, 3) == 1
    assert abs(tokens_kept(fresh, 3)) < 0.01
    half = torch.cat([frozen[..., :3], fresh[..., 3:]], -1)
    assert tokens_kept(half, 3) == pytest.approx(0.5, abs=0.03)
    assert math.isnan(tokens_kept(fresh, 400))


def test_runs_of_mixing_accumulate_and_are_held_against_the_exact_law(tmp_path, monkeypatch, capsys):
    def tables(*options):
        given = ["--targets", "toy", "--chains", "4", "--rows", "440", "--file", str(tmp_path / "runs"), *options]
        monkeypatch.setattr(sys, "argv", ["mixing", *given])
        mixing.main()
        return mixing.lines(tmp_path / "runs"), capsys.readouterr().out

    first, _ = tables("--samplers", "careful loop")
    found, shown = tables("--samplers", "careful loop", "pairs")
    assert found[:2] == first and [line.get("sampler") for line in found] == [None, "careful loop", "pairs"]
    assert all(440 <= line["rows"] < 600 and line["r_hat"] > 0 and line["commit"] for line in found[1:])
    assert reference_of("toy", 440, found)[:4] == (found[0]["known"][0], 0, found[0]["known"][1], 0)
    assert "enumeration, 2,048 rows" in shown and shown.count("| toy |") == 7


def test_what_is_known_of_a_toy_is_by_its_energies():
    law = mixing.target_of("toy")
    energies = law.energies()
    assert energies.shape == (8,) * 4
    for place in ((0, 1, 2, 3), (7, 7, 0, 5), (3, 0, 0, 6)):
        ids = torch.tensor([1, *law.words[list(place)], 2])
        assert float(energies[place]) == pytest.approx(
            sum(plain_token_energies(law.model, ids, [1, 2, 3, 4])), abs=1e-4
        )
    p = (-energies).flatten().softmax(0)
    words = torch.cartesian_prod(*[law.words] * 4)
    share = float(p @ (words == law.token).double().mean(1))
    assert law.known()[:2] == pytest.approx((float(p @ energies.flatten()), share))


def test_the_gradient_of_a_lattice_is_what_a_changed_site_gains():
    """Its energy is linear in each site's one-hot state."""
    law = mixing_targets.LatticeTarget(potts(3, 4, states=3, strength=0.7, field=torch.rand(3, 4, 3).double()))
    ids = law.starts(5, seed=0)
    energy, gradient = law.energy_and_gradient(ids)
    assert torch.allclose(energy, law.lattice(ids))
    for site, state in ((0, 2), (5, 0), (11, 1)):
        changed = ids.clone()
        changed[:, site] = state
        gained = gradient[:, site, state] - gradient[:, site].gather(1, ids[:, site : site + 1])[:, 0]
        assert torch.allclose(law.lattice(changed) - energy, gained)


@pytest.mark.parametrize("sampler", ["careful loop", "SMC of 64", "Gibbs with gradients", "discrete Langevin"])
def test_a_small_lattice_is_sampled_right(sampler):
    law = mixing_targets.LatticeTarget(ising(2, 3, strength=0.3))
    draws = SAMPLERS[sampler](law, law.starts(40, seed=0), 6_000, 0)
    assert 6_000 <= draws.rows < 8_000
    assert torch.allclose(draws.energies, law.lattice(draws.states.flatten(0, 1)).view_as(draws.energies))
    first = 0 if draws.log_weights is not None else draws.energies.shape[1] // 4
    mean, error = over_chains(draws.energies[:, first:], draws.log_weights)
    assert abs(mean - law.known()[0]) < 4 * error < 0.5


def test_means_and_errors_over_runs_of_particles_are_those_of_their_weights():
    values, log_weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert over_chains(values) == pytest.approx((2.5, 1.0))
    mean = (1 + 3 + 4) / 3
    assert over_chains(values, log_weights)[0] == pytest.approx(mean)
    assert over_chains(values, torch.tensor([[9.0, 9.0], [9.0, 9.0]])) == pytest.approx((2.5, 1.0))
    assert rows_to([(10, 3.0), (20, 0.5), (40, 2.0), (80, 0.9), (160, 0.8)], 1.0) == 80
    assert rows_to([(10, 3.0), (20, 1.5)], 1.0) is None


def table_of_energies():
    """Three positions of four tokens: energies (4, 4, 4), and `evaluate` of their extension to any one-hot vectors."""
    table = 3 * torch.rand(4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def evaluate(tokens):
        one, two, three = tokens.T
        gradient = torch.stack([table[:, two, three].T, table[one, :, three], table[one, two]], 1)
        return table[one, two, three], gradient

    return table, evaluate


@pytest.mark.parametrize("proposal", [GibbsWithGradients(), DiscreteLangevin(0.5), DiscreteLangevin(5.0)])
def test_gradient_samplers_keep_the_law(proposal):
    table, evaluate = table_of_energies()
    law = (-table).flatten().softmax(0)
    generator = torch.Generator().manual_seed(0)
    number = torch.multinomial(law, 20_000, replacement=True, generator=generator)
    state = state_at(torch.stack([number // 16, number // 4 % 4, number % 4], 1), evaluate)
    for _ in range(4):
        state, accepted = step(state, evaluate, proposal, generator)
    assert 0.05 < float(accepted.double().mean()) < 0.99
    assert torch.equal(state.energy, evaluate(state.tokens)[0]) and torch.equal(
        state.gradient, evaluate(state.tokens)[1]
    )
    counts = torch.bincount(state.tokens @ torch.tensor([16, 4, 1]), minlength=64)
    assert float((counts / 20_000 - law).abs().sum() / 2) < total_variation_limit(law, 20_000)


@pytest.mark.parametrize("proposal", [GibbsWithGradients(), DiscreteLangevin(0.5)])
def test_gradient_samplers_state_the_probability_of_their_draws(proposal):
    _, evaluate = table_of_energies()
    tokens = torch.tensor([[3, 0, 1]]).repeat(20_000, 1)
    _, gradient = evaluate(tokens)
    drawn = proposal.draw(gradient, tokens, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn @ torch.tensor([16, 4, 1]), minlength=64)
    every = torch.cartesian_prod(*[torch.arange(4)] * 3)
    possible = torch.ones(64, dtype=torch.bool)
    if isinstance(proposal, GibbsWithGradients):
        possible = (every != tokens[0]).sum(1) == 1
    expected = torch.zeros(64, dtype=torch.float64)
    one = int(possible.sum())
    expected[possible] = proposal.log_probability(gradient[:one], tokens[:one], every[possible]).exp()
    assert float(expected.sum()) == pytest.approx(1)
    assert float((counts / 20_000 - expected).abs().sum() / 2) < total_variation_limit(expected, 20_000)


def test_the_gradient_of_a_masked_energy_is_that_of_finite_differences():
    law = mixing.target_of("toy")
    model = law.model.mlm.double()
    numbers = torch.tensor([[0, 5, 2, 7], [3, 3, 1, 0]])
    energy, gradient = law.energy_and_gradient(numbers)
    ids = torch.cat([torch.tensor([[1]] * 2), law.words[numbers], torch.tensor([[2]] * 2)], 1)
    assert energy.tolist() == pytest.approx([sum(plain_token_energies(law.model, row, [1, 2, 3, 4])) for row in ids])
    table = model.get_input_embeddings().weight.detach()

    def relaxed(one_hot):
        """Of one sequence (4, W) of mixtures of words."""
        total = 0.0
        for position in range(4):
            embedded = table[ids[:1]].clone()
            embedded[0, 1:5] = one_hot @ table[law.words]
            embedded[0, 1 + position] = table[3]
            with torch.no_grad():
                scores = model(inputs_embeds=embedded).logits[0, 1 + position].log_softmax(-1)
            total -= float(one_hot[position] @ scores[law.words])
        return total

    one_hot = torch.nn.functional.one_hot(numbers[0], len(law.words)).double()
    for place in ((0, 0), (1, 5), (1, 2), (3, 4)):
        change = torch.zeros_like(one_hot)
        change[place] = 1e-5
        found = (relaxed(one_hot + change) - relaxed(one_hot - change)) / 2e-5
        assert float(gradient[0][place]) == pytest.approx(found, abs=1e-6)
    model.float()


def test_designs_stay_within_their_budget_and_what_is_missing_is_told(monkeypatch, capsys):
    case = design.Case("AWGD", 1, 4, 2, 3)
    model = EnergyModel(design.tiny(), **token_roles(design.tokenizer_of_letters(), len(design.NAMES)))
    found = design.ours(model, case, budget=150)
    assert len(found.last) == 3 and 150 <= found.passes < 300
    assert {text[0] for text in found.seen} == {"A"} and max(design.changes(case, text) for text in found.seen) == 2
    ids = torch.tensor([[2, *(design.NAMES.index(letter) for letter in found.best[0]), 3]])
    expected = sum(plain_token_energies(model, ids[0], [2, 3, 4]))
    assert design.energies_of(model, case, found.best[:1]).tolist() == pytest.approx([expected], abs=1e-4)
    monkeypatch.setattr(design, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["design", "--threads", "1"])
    design.main()
    assert "left out: EvoProtGrad isn't installed" in capsys.readouterr().out


@pytest.mark.slow
def test_every_part_for_a_card_runs_in_tiny_sizes(tmp_path, monkeypatch):
    twins = {"rows, bfloat16, CUDA graphs", "rows, float32, compiled"}  # of a part that is run
    parts = [part for part in gpu.PARTS if part not in twins and (part != "scoring" or find_spec("minicons"))]
    options = ["--quick", "--device", "cpu", "--seconds", "600", "--out", str(tmp_path / "lines"), "--parts", *parts]
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as it sets it
    gpu.main()
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert not [line for line in lines if "failed" in line]
    figures = {line["part"] for line in lines if not {"machine", "all of it, s"} & set(line)}
    assert figures == set(parts)
    same = next(line for line in lines if "of another token budget" in line)
    assert same["of another token budget"] == same["chains, float64, share that is the same"] == 1


def test_a_fault_in_one_part_loses_no_other(tmp_path, monkeypatch):
    def fine(device, quick):
        yield {"device": device}

    def crashes(device, quick):
        yield {"so far": 1}
        os._exit(3)

    def hangs(device, quick):
        time.sleep(600)
        yield {}

    def fails(device, quick):
        raise ValueError("bad")

    parts = {"crashes": (crashes, 60), "hangs": (hangs, 0.2), "fails": (fails, 60), "fine": (fine, 60)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--out", str(tmp_path / "lines")])
    gpu.main()
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    failed = {line["part"]: line["failed"] for line in lines if "failed" in line}
    assert failed.keys() == {"crashes", "hangs", "fails"} and "bad" in failed["fails"]
    assert {"part": "crashes", "so far": 1} in lines and {"part": "fine", "device": "cpu"} in lines


def test_moves_of_pairs_are_those_of_the_transition_matrix():
    target, proposal = torch.rand(2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log()
    target, proposal = (own - own.flatten().logsumexp(0) for own in (target, proposal))
    pi, q = target.exp().flatten().tolist(), proposal.exp().flatten().tolist()
    expected = sum(pi[y] * q[z] * min(1, pi[z] * q[y] / (pi[y] * q[z])) for y in range(6) for z in range(6) if y != z)
    assert pair_joints.moves(target, proposal) == pytest.approx(expected)


def test_a_pair_given_the_rest_has_the_law_of_whole_energies():
    model, tokenizer = pair_joints.load_embedded()
    pair = pair_joints.Pair(model, tokenizer, "and god said, let there be light", 3, words=2)
    one, other = pair.found.tokens
    ids = tokenizer("and god said, let there be light", return_tensors="pt").input_ids[0]
    assert (one[pair.true[0]], other[pair.true[1]]) == (ids[3], ids[4])
    rows = ids.repeat(len(one) * len(other), 1)
    rows[:, 3:5] = torch.cartesian_prod(one, other)
    expected = (-model(rows).energy.double()).log_softmax(0)
    assert torch.allclose(pair.target.flatten(), expected, atol=1e-4)
    assert all(own.shape == pair.target.shape for own, _ in pair.proposals().values())


@pytest.mark.parametrize("once", [False, True])
def test_a_step_of_minimum_risk_is_that_of_a_loop_by_hand(once, monkeypatch):
    monkeypatch.setattr(candidates, "ENDS", 4)
    model, batch = candidates.model_and_batch("tiny")
    model.double()
    trainer = candidates.trainer_of("minimum risk", model, batch, 3)
    (inputs,), items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    drawn, draw = [], trainer.candidates.sample
    trainer.candidates.sample = lambda *given: drawn.append(draw(*given)) or drawn[0]
    loss = trainer.training_step(model, inputs, items)
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    samples = [ids for of_row in drawn[0][0] for ids in of_row]
    assert len({tuple(ids.tolist()) for ids in samples}) == 6 and len({len(ids) for ids in samples}) > 1
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor([1, *ids]) for ids in samples], batch_first=True)
    expected = candidates.risk_by_hand(model, batch, ids, model.generation_config.eos_token_id, once)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    by_hand = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert float((found - by_hand).norm() / by_hand.norm()) < 1e-6


@pytest.mark.parametrize("program", candidates.PROGRAMS)
def test_programs_on_candidates_answer_each_line_with_seconds_and_memory(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    candidates.work(program, "tiny", 3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2 and all(seconds > 0 and peak >= 0 for seconds, peak in lines)
