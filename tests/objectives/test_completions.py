"""Splitting prompts from targets, padding, ends, log probabilities."""

import pytest
import torch

from hf_ebm.objectives.completions import ends_at, pad_left, pad_right, sequence_log_probs, split_completions

ROWS = [([5, 6], [7, 8, 1]), ([9], [4, 1]), ([2, 3, 4], [1])]


def batch(side):
    width = max(len(p) + len(t) for p, t in ROWS)
    ids, labels, mask = [], [], []
    for prompt, target in ROWS:
        fill = width - len(prompt) - len(target)
        parts = (prompt + target, [-100] * len(prompt) + target, [1] * (width - fill))
        for values, part, padding in zip((ids, labels, mask), parts, (0, -100, 0), strict=True):
            values.append([padding] * fill + part if side == "left" else part + [padding] * fill)
    return tuple(torch.tensor(values) for values in (ids, labels, mask))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_of_the_padding_is_all_one(side):
    ids, labels, mask = batch(side)
    prompts, targets = split_completions(ids, labels, mask)
    assert [(p.tolist(), t.tolist()) for p, t in zip(prompts, targets, strict=True)] == ROWS


def test_the_first_token_is_never_a_target():
    ids = torch.tensor([[3, 4, 5]])
    prompts, targets = split_completions(ids, ids)
    assert prompts[0].tolist() == [3] and targets[0].tolist() == [4, 5]


@pytest.mark.parametrize("labels", [[-100, -100, -100], [3, -100, -100]])
def test_a_row_without_a_target_is_a_prompt(labels):
    prompts, targets = split_completions(torch.tensor([[3, 4, 5]]), torch.tensor([labels]))
    assert prompts[0].tolist() == [3, 4, 5] and targets[0].tolist() == []


def test_a_row_of_padding_alone_is_refused():
    ids = torch.tensor([[3, 4], [0, 0]])
    with pytest.raises(ValueError, match="input_ids: row 1 must have a token that isn't padding"):
        split_completions(ids, torch.full_like(ids, -100), torch.tensor([[1, 1], [0, 0]]))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([-100, 4, -100], "row 0 must have all its targets at its end"),
        ([-100, 9, 5], "row 0 must equal input_ids"),
    ],
)
def test_labels_that_are_no_completion(labels, message):
    with pytest.raises(ValueError, match=message):
        split_completions(torch.tensor([[3, 4, 5]]), torch.tensor([labels]))


def test_padding_and_ends():
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    left, left_mask = pad_left(rows, 0)
    right, right_mask = pad_right(rows, 0)
    assert left.tolist() == [[5, 6, 7], [0, 0, 8]] and left_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert right.tolist() == [[5, 6, 7], [8, 0, 0]] and right_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    ended = ends_at(torch.tensor([[4, 1, 1], [4, 4, 4], [2, 4, 1]]), [1, 2])
    assert [row.tolist() for row in ended] == [[4, 1], [4, 4, 4], [2]]


def test_log_probabilities_leave_out_what_has_no_label():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, -100, 4], [-100, 2, -100]])
    logs = torch.log_softmax(logits, -1)
    expected = torch.stack([logs[0, 0, 1] + logs[0, 2, 4], logs[1, 1, 2]])
    torch.testing.assert_close(sequence_log_probs(logits, labels), expected)
    half = sequence_log_probs(logits.bfloat16(), labels)
    assert half.dtype == torch.float32
