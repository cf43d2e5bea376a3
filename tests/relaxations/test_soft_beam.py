"""The relaxed beam search: gradients, its limit against a plain beam search, losses, rows of unequal length."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from hf_ebm.objectives.costs import HammingCost
from hf_ebm.relaxations.soft_beam import (
    SoftBeamResult,
    SoftBeamSettings,
    direct_loss,
    gold_scores,
    hinge_loss,
    relaxed_beam_search,
)
from hf_ebm.relaxations.stepwise import StepwiseDecoder
from tests.seq2seq_families import seq2seq_batch, tiny_seq2seq

FAMILIES = ["lstm additive", "lstm fixed", "bart", "t5", "marian"]
SETTINGS = SoftBeamSettings(num_beams=3, alpha=0.7)


def search(model, batch, settings=SETTINGS, cost=None, cost_augmented=False, decoder=None):
    decoder = decoder or StepwiseDecoder(model)
    start = decoder.embed(decoder.gold_ids(batch["labels"])[:, 0])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    cost = HammingCost() if cost is None else cost
    return relaxed_beam_search(decoder, start, inputs, batch["labels"], cost, settings, cost_augmented)


def plain_beam_search(model, source, mask, start, length, beams, normalization):
    """Beam search of one row over whole prefixes, no cache: (score, tokens, number of the parent) of each beam."""
    running, parents = [(0.0, [start])], []
    for _ in range(length):
        ids = torch.tensor([tokens for _, tokens in running])
        logits = model(
            input_ids=source.expand(len(ids), -1), attention_mask=mask.expand(len(ids), -1), decoder_input_ids=ids
        ).logits[:, -1]
        scores = logits.log_softmax(-1) if normalization == "local" else logits
        successors = [
            (score + float(scores[beam, token]), [*tokens, token], beam)
            for beam, (score, tokens) in enumerate(running)
            for token in range(scores.shape[-1])
        ]
        best = sorted(successors, key=lambda item: -item[0])[:beams]
        running, parents = [item[:2] for item in best], [*parents, [item[2] for item in best]]
    return running, parents


@pytest.mark.parametrize("normalization", ["local", "global"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_tends_to_beam_search(family, normalization):
    """Scores, backpointers, tokens and loss, each row to the length of its own labels."""
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    settings = SoftBeamSettings(3, 1e11, normalization)
    decoder = StepwiseDecoder(model)
    result = search(model, batch, settings, decoder=decoder)
    starts = decoder.gold_ids(batch["labels"])[:, 0]
    losses = direct_loss(result, 1e11)
    for row, labels in enumerate(batch["labels"]):
        gold = labels[labels != -100].tolist()
        running, parents = plain_beam_search(
            model, batch["input_ids"][row], batch["attention_mask"][row], int(starts[row]), len(gold), 3, normalization
        )
        for beam, (score, tokens) in enumerate(running):
            assert float(result.scores[row, beam]) == pytest.approx(score, abs=1e-5)
            wrong = sum(a != b for a, b in zip(tokens[1:], gold, strict=True))
            assert float(result.costs[row, beam]) == pytest.approx(wrong, abs=1e-5)
        for step, parent in enumerate(parents):
            assert result.beam_indices[step, row].tolist() == parent
        assert result.tokens[len(gold) - 1, row].tolist() == [tokens[-1] for _, tokens in running]
        assert float(losses[row]) == pytest.approx(float(result.costs[row, 0]), abs=1e-5)


@pytest.mark.parametrize("family", ["lstm additive", "lstm fixed", "bart"])
@pytest.mark.parametrize("loss", ["direct", "hinge"])
def test_gradcheck(family, loss):
    """The whole objective by finite differences, along random directions of all parameters."""
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    batch = {name: value[:2, :4].contiguous() for name, value in batch.items()}
    decoder = StepwiseDecoder(model)
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]

    def objective():
        result = search(model, batch, cost_augmented=loss == "hinge", decoder=decoder)
        if loss == "direct":
            return direct_loss(result, SETTINGS.alpha).sum()
        logits = model(**batch).logits
        return hinge_loss(result, gold_scores(logits, batch["labels"], "local"), SETTINGS.alpha).sum()

    gradients = torch.autograd.grad(objective(), parameters, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    ends = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for p, value, direction in zip(parameters, values, directions, strict=True):
                p.copy_(value + step * direction)
            ends.append(float(objective()))
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-6)
    assert abs(slope) > 1e-3


@pytest.mark.parametrize("family", ["lstm additive", "bart", "t5"])
def test_checkpointed_steps_change_nothing(family):
    model, batch = tiny_seq2seq(family).train(), seq2seq_batch(family)
    gradients = []
    for checkpoint_steps in (False, True):
        result = search(model, batch, replace(SETTINGS, checkpoint_steps=checkpoint_steps))
        loss = direct_loss(result, SETTINGS.alpha).sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        assert result.beam_indices.shape == (8, 3, 3)
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_do_not_depend_on_each_other_or_on_padding(family):
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    together = search(model, batch)
    for row, length in enumerate((8, 5, 7)):
        alone = search(model, {name: value[row : row + 1, :length] for name, value in batch.items()})
        torch.testing.assert_close(alone.scores[0], together.scores[row], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(alone.costs[0], together.costs[row], atol=1e-6, rtol=1e-6)


def test_the_losses_at_infinite_alpha_are_those_of_the_best_beam():
    scores = torch.tensor([[-3.0, -1.0, -2.0], [4.0, 1.0, 0.0]])
    costs = torch.tensor([[5.0, 2.0, 7.0], [1.0, 3.0, 9.0]])
    result = SoftBeamResult(scores, costs, torch.empty(0), torch.empty(0))
    assert direct_loss(result, math.inf).tolist() == direct_loss(result, 1e4).tolist() == [2.0, 1.0]
    assert hinge_loss(result, torch.tensor([-1.5, 5.0]), math.inf).tolist() == [0.5, 0.0]


@torch.no_grad()
def test_the_hinge_is_zero_only_for_a_safe_gold_and_grows_with_the_cost():
    model, batch = tiny_seq2seq("lstm additive"), seq2seq_batch("lstm additive")
    gold = gold_scores(model(**batch).logits, batch["labels"], "local")
    hinges = []
    for scale in (0.0, 1.0, 3.0):
        result = search(
            model, batch, cost=lambda labels, size, s=scale: torch.full(labels.shape, s), cost_augmented=True
        )
        hinges.append(hinge_loss(result, gold, SETTINGS.alpha))
    assert bool((hinges[0] < hinges[1]).all()) and bool((hinges[1] < hinges[2]).all())
    assert bool((hinge_loss(result, gold + 1e3, SETTINGS.alpha) == 0).all())


@torch.no_grad()
def test_costs_by_token_and_by_position():
    model, batch = tiny_seq2seq("lstm additive"), seq2seq_batch("lstm additive")
    plain = search(model, batch).costs
    size = 37
    weighted = search(model, batch, cost=HammingCost([2.0] * size)).costs
    torch.testing.assert_close(weighted, 2 * plain)
    by_position = search(model, batch, cost=lambda labels, size: torch.full(labels.shape, 2.0)).costs
    torch.testing.assert_close(by_position, 2 * plain)


@pytest.mark.half_precision
@torch.no_grad()
def test_costs_keep_their_precision_under_autocast():
    """Hard choices, also where logits in half precision tie: a beam's cost counts the wrong tokens on its way back.

    That goes past 256, from where on half precision cannot add one.
    """
    model = tiny_seq2seq("lstm additive").float()
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(4, 28, (2, 6), generator=generator)}
    batch |= {"attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch |= {"labels": torch.randint(4, 28, (2, 300), generator=generator)}
    decoder = StepwiseDecoder(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = search(model, batch, SoftBeamSettings(2, math.inf), decoder=decoder)
    assert float(result.costs.min()) > 257
    for row, beam in itertools.product(range(2), range(2)):
        wrong, at = 0, beam
        for step in reversed(range(300)):
            wrong += int(result.tokens[step, row, at] != batch["labels"][row, step])
            at = int(result.beam_indices[step, row, at])
        assert float(result.costs[row, beam]) == wrong


@torch.no_grad()
def test_refusals():
    model, batch = tiny_seq2seq("lstm additive"), seq2seq_batch("lstm additive")
    with pytest.raises(ValueError, match="num_beams must be at most the vocabulary of 37 tokens, got 38"):
        search(model, batch, SoftBeamSettings(38))
    with pytest.raises(ValueError, match=r"cost must return .* \(3, 8\) or \(3, 8, 37\), got .* \(3,\)"):
        search(model, batch, cost=lambda labels, size: torch.ones(3))
    with pytest.raises(ValueError, match="cost must return finite numbers"):
        search(model, batch, cost=lambda labels, size: torch.full(labels.shape, math.inf))
    gap = {**batch, "labels": batch["labels"].clone()}
    gap["labels"][1, 0] = -100
    with pytest.raises(ValueError, match="labels: row 1 has -100 before its end"):
        search(model, gap)
    for settings, message in (
        ({"num_beams": 0}, "num_beams must be a whole number from 1 up, got 0"),
        ({"alpha": 0.0}, "alpha must be above 0, got 0.0"),
        ({"normalization": "none"}, "normalization must be one of 'local', 'global', got 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            SoftBeamSettings(**settings)
