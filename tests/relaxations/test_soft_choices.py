"""Soft argmax, soft samples and soft top-k: limits, gradients, refusals."""

import math

import pytest
import torch

from hf_ebm.relaxations.soft_choices import gumbel_noise, soft_top_k, token_weights


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_soft_argmax_tends_to_argmax():
    scores = draw(5, 7)
    hard = token_weights(scores, "argmax")
    assert torch.equal(hard, torch.nn.functional.one_hot(scores.argmax(-1), 7).double())
    gaps = [float((token_weights(scores, "soft_argmax", alpha) - hard).abs().max()) for alpha in (1, 10, 100, 1e5)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-12


def test_soft_sample_is_the_relaxation_of_the_sample_with_the_same_noise():
    scores = draw(4, 6)
    hard = token_weights(scores, "sample", generator=torch.Generator().manual_seed(3))
    soft = token_weights(scores, "soft_sample", 1e6, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(soft, hard)


def test_samples_follow_the_softmax():
    scores = draw(1, 5).expand(200_000, 5)
    counts = token_weights(scores, "sample", generator=torch.Generator().manual_seed(0)).mean(0)
    expected = scores[0].softmax(-1)
    error = 4 * (expected * (1 - expected) / len(scores)).sqrt()
    assert bool(((counts - expected).abs() < error).all())
    assert not bool(((counts - (2 * scores[0]).softmax(-1)).abs() < error).all())


def test_the_noise_is_seeded_and_finite():
    like = torch.zeros(100_000)
    first = gumbel_noise(like, torch.Generator().manual_seed(1))
    assert torch.equal(first, gumbel_noise(like, torch.Generator().manual_seed(1)))
    assert bool(first.isfinite().all())
    assert float(first.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(first.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)


@pytest.mark.parametrize("inputs", ["soft_argmax", "soft_sample"])
def test_gradients_of_soft_choices(inputs):
    scores = draw(2, 5).requires_grad_()

    def choose(scores):
        return token_weights(scores, inputs, 1.7, torch.Generator().manual_seed(2))

    assert torch.autograd.gradcheck(choose, (scores,))


@pytest.mark.parametrize("inputs", ["argmax", "sample"])
def test_hard_choices_have_no_gradient(inputs):
    assert not token_weights(draw(2, 5).requires_grad_(), inputs).requires_grad


def test_soft_choice_refusals():
    with pytest.raises(ValueError, match=r"inputs must be one of .*, got 'beam'"):
        token_weights(draw(1, 3), "beam")
    with pytest.raises(ValueError, match="alpha must be above 0, got 0"):
        token_weights(draw(1, 3), "soft_argmax", 0.0)


def by_definition(scores, num_beams, alpha):
    """Algorithm 1, lines 6 to 12, with every distribution written out."""
    rows, _, vocab_size = scores.shape
    flat = scores.reshape(rows, -1)
    best = flat.topk(num_beams).values
    p = (-alpha * (flat[:, None] - best[..., None]) ** 2).softmax(-1)
    shaped = p.view(rows, num_beams, -1, vocab_size)
    return (p * flat[:, None]).sum(-1), shaped.sum(3), shaped.sum(2)


@pytest.mark.parametrize("vocab_size", [5, 20_000])  # all rows together; two, then one
def test_soft_top_k_equals_its_definition_with_gradients(vocab_size):
    scores = draw(3, 2, vocab_size).requires_grad_()
    found, wanted = soft_top_k(scores, 3, 1.3), by_definition(scores, 3, 1.3)
    weights = [draw(*part.shape, seed=i) for i, part in enumerate(wanted)]
    gradients = []
    for parts in (found, wanted):
        gradients.append(
            torch.autograd.grad(sum((a * b).sum() for a, b in zip(parts, weights, strict=True)), scores)[0]
        )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(*gradients)


def test_soft_top_k_gradcheck():
    scores = draw(2, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: tuple(soft_top_k(s, 2, 0.8)), (scores,))


def test_soft_top_k_tends_to_the_hard_selection():
    scores = draw(4, 3, 6)
    hard = soft_top_k(scores, 3, math.inf)
    values, indices = scores.flatten(1).topk(3)
    assert torch.equal(hard.scores, values)
    assert torch.equal(hard.beam_weights.argmax(-1), indices // 6)
    assert torch.equal(hard.token_weights.argmax(-1), indices % 6)
    soft = soft_top_k(scores, 3, 1e8)
    for a, b in zip(soft, hard, strict=True):
        torch.testing.assert_close(a, b)


def test_soft_top_k_with_forbidden_successors_and_large_scores():
    scores = draw(2, 2, 4, dtype=torch.float32) + 300
    scores[:, 1] = -1e9
    found = soft_top_k(scores.requires_grad_(), 2, 4.0)
    assert float(found.beam_weights[..., 1].max()) == 0
    sum(part.sum() for part in found).backward()
    assert bool(scores.grad.isfinite().all())


def test_soft_top_k_refusals():
    with pytest.raises(ValueError, match="alpha must be above 0, got -1"):
        soft_top_k(draw(1, 1, 4), 2, -1.0)
    with pytest.raises(ValueError, match=r"num_beams must be from 1 to the 4 successors, got 5"):
        soft_top_k(draw(1, 1, 4), 5, 1.0)
    with pytest.raises(ValueError, match=r"float32 or float64, got torch.bfloat16"):
        soft_top_k(draw(1, 1, 4).bfloat16(), 2, 1.0)
