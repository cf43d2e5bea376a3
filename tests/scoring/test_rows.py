"""Packing, budgets and the head at chosen positions: none of them may change a value."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.bert.modeling_bert import BertOnlyMLMHead

from hf_ebm.scoring.energies import token_energies
from hf_ebm.scoring.head import PositionLogits, gather_positions
from hf_ebm.scoring.masked_batches import MaskedBatchRunner
from hf_ebm.scoring.rows import Context, MaskedRows, Sequences, attended_spans
from tests.conftest import plain_token_energies, tiny_energy_model, tiny_mlm


def sequences_of(rows: list[list[int]]) -> tuple[Sequences, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    stop = torch.tensor([len(row) for row in rows])
    scored = (ids > 4) & (torch.arange(longest) < stop[:, None])
    return Sequences(ids, torch.zeros(len(rows), dtype=torch.long), stop), scored


ROWS = [[1, 5, 6, 7, 2], [1, 8, 2], [1, 5, 5, 5, 8, 7, 6, 5, 2], [1, 6, 7, 2], [1, 7, 2]]


@pytest.mark.parametrize("budget", [1, 7, 30, 10_000])
def test_any_budget_gives_the_values_of_a_plain_loop(energy, budget):
    model = tiny_energy_model(energy)
    sequences, scored = sequences_of(ROWS)
    with torch.no_grad():
        found = token_energies(model.masked_batch_runner(budget), sequences, scored, energy)
    for row, ids in enumerate(ROWS):
        positions = [i for i, token in enumerate(ids) if token > 4]
        expected = plain_token_energies(model, torch.tensor(ids), positions)
        assert found[row, positions].tolist() == pytest.approx(expected, abs=1e-5)
        assert float(found[row].abs().sum()) == pytest.approx(sum(map(abs, expected)), abs=1e-4)


def test_a_pass_that_is_run_again_has_the_same_dropout(energy, monkeypatch):
    sequences, scored = sequences_of(ROWS)
    gradients = []
    for again in (True, False):
        if not again:
            monkeypatch.setattr(
                "hf_ebm.scoring.masked_batches.checkpoint", lambda run, *args, use_reentrant: run(*args)
            )
        model = tiny_energy_model(energy, dtype=torch.float64)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        model.train()
        torch.manual_seed(0)
        token_energies(model.masked_batch_runner(20), sequences, scored, energy).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_memory_shortage_halves_the_budget_and_goes_on(energy):
    model = tiny_energy_model(energy)
    sequences, scored = sequences_of(ROWS)
    expected = token_energies(model.masked_batch_runner(), sequences, scored, energy)
    calls = []
    plain = model.masked_batch_runner().position_logits

    def short_of_memory(ids, positions, **inputs):
        calls.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(ids, positions, **inputs)

    runner = MaskedBatchRunner(short_of_memory, 3, 9, token_budget=64)
    torch.testing.assert_close(token_energies(runner, sequences, scored, energy), expected)
    assert max(calls) > 2 and runner.token_budget(torch.device("cpu")) < 64
    assert runner.num_rows == int(scored.sum())


def test_runners_of_a_model_count_for_themselves_and_share_what_they_found_out(monkeypatch):
    model = tiny_energy_model()
    sequences, scored = sequences_of(ROWS)
    one, other = model.masked_batch_runner(), model.masked_batch_runner()
    together = PositionLogits.together

    def short_of_memory(self, passes):
        if sum(len(one.input_ids) for one in passes) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return together(self, passes)

    monkeypatch.setattr(PositionLogits, "together", short_of_memory)
    token_energies(one, sequences, scored, "raw")
    assert (one.num_rows, other.num_rows, model.masked_batch_runner().num_rows) == (int(scored.sum()), 0, 0)
    cpu = torch.device("cpu")
    assert one.token_budget(cpu) == other.token_budget(cpu) == model.masked_batch_runner().token_budget(cpu) < 100
    assert model.masked_batch_runner(500).token_budget(cpu) == 500


def test_the_runner_has_its_old_name_too():
    with pytest.warns(FutureWarning, match="MaskedBatchRunner"):
        from hf_ebm.scoring.rows import RowRunner
    assert RowRunner is MaskedBatchRunner


def test_memory_shortage_of_a_head_for_several_lengths_ends():
    """Whether it is many rows or many tokens that are too much."""
    model = tiny_energy_model()
    sequences, scored = sequences_of([[1, *[5] * 7, 2], [1, *[6] * 8, 2]])
    expected = token_energies(model.masked_batch_runner(), sequences, scored, "raw")
    plain, pools = model.masked_batch_runner().position_logits, []

    class ShortOfMemory:
        def together(self, passes):
            pools.append([one.input_ids.shape for one in passes])
            if sum(rows for rows, _ in pools[-1]) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return plain.together(passes)

    runner = MaskedBatchRunner(ShortOfMemory(), 3, 9, token_budget=64)
    with torch.no_grad():  # with gradients a budget holds all passes of a head
        torch.testing.assert_close(token_energies(runner, sequences, scored, "raw"), expected)
    assert len(pools[0]) > 1 and runner.num_rows == int(scored.sum())


def test_memory_shortage_on_a_single_row_is_an_error():
    def never(ids, positions):
        raise torch.OutOfMemoryError("CUDA out of memory")

    sequences, scored = sequences_of(ROWS)
    with pytest.raises(torch.OutOfMemoryError):
        token_energies(MaskedBatchRunner(never, 3, 9, token_budget=64), sequences, scored, "raw")


def test_big_vocabularies_make_passes_smaller():
    sizes = []

    def logits(ids, positions):
        sizes.append(ids.shape[0])
        return torch.zeros(*positions.shape, 250_000)

    rows = MaskedRows(
        torch.zeros(40, dtype=torch.long), torch.zeros(40, 0, dtype=torch.long), torch.zeros(40, 20).long()
    )
    sequences = Sequences(torch.ones(1, 5, dtype=torch.long), torch.tensor([0]), torch.tensor([5]))
    MaskedBatchRunner(logits, 3, 250_000, token_budget=4096)(sequences, rows, lambda values, n: values[:, 0, 0])
    assert max(sizes) * 20 * 250_000 * 12 <= 4096 * 65_536


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_are_named(value):
    model = tiny_energy_model()
    plain = model.masked_batch_runner().position_logits

    def spoiled(ids, positions, **inputs):
        logits = plain(ids, positions, **inputs).clone()
        logits[(ids == 8).any(1), :, 6] = value
        return logits

    sequences, scored = sequences_of([[1, 5, 6, 2], [1, 5, 6, 8, 2]])
    with pytest.raises(ValueError, match="NaN or infinite logits for row 1, position 1"):
        token_energies(MaskedBatchRunner(spoiled, 3, 9), sequences, scored, "local")


def test_head_falls_back_when_positions_do_not_reproduce_the_full_forward():
    """A head that mixes positions cannot be run on some of them; values must still be right."""
    model = tiny_mlm()

    class Mixing(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head = head

        def forward(self, hidden):
            return self.head(hidden + hidden.mean(1, keepdim=True))

    model.cls = Mixing(model.cls)
    ids = torch.tensor([[1, 5, 3, 7, 2]])
    positions = torch.tensor([[2]])
    logits = PositionLogits(model)
    with torch.no_grad():
        found = logits(ids, positions)
        torch.testing.assert_close(found[0, 0], model(input_ids=ids).logits[0, 2])
    assert list(logits._verified.values()) == [False]


@pytest.mark.half_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 1e-4])
def test_the_last_feed_forward_network_runs_everywhere_where_a_later_layer_mixes_positions(dtype, share):
    """However little it mixes, and though a comparison of logits in half precision would not show it."""
    model = tiny_mlm().to(dtype)

    class Mixing(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, hidden):
            hidden = self.norm(hidden)
            return hidden + share * hidden.mean(1, keepdim=True) if share else hidden

    output = model.bert.encoder.layer[-1].output
    output.LayerNorm = Mixing(output.LayerNorm)
    ids, positions = torch.tensor([[1, 5, 3, 7, 2], [1, 3, 6, 4, 2]]), torch.tensor([[2], [1]])
    logits = PositionLogits(model)
    with torch.no_grad():
        found = logits(ids, positions)
        full = model(input_ids=ids).logits
    torch.testing.assert_close(found[:, 0], full[torch.arange(2), positions[:, 0]], atol=1e-2, rtol=1e-2)
    held = {key[0]: holds for key, holds in logits._verified.items()}
    assert held == {"feed-forward": not share, "head": True}


@pytest.fixture
def heads(monkeypatch) -> list[int]:
    """How many rows each run of a tiny model's head was given, in order."""
    rows: list[int] = []
    forward = BertOnlyMLMHead.forward
    monkeypatch.setattr(BertOnlyMLMHead, "forward", lambda self, x: rows.append(len(x)) or forward(self, x))
    return rows


def test_one_head_serves_all_lengths(heads, energy):
    model = tiny_energy_model(energy)
    sequences, scored = sequences_of(ROWS)
    with torch.no_grad():
        first = token_energies(model.masked_batch_runner(), sequences, scored, energy)  # checks that it holds
        heads.clear()
        again = token_energies(model.masked_batch_runner(), sequences, scored, energy)
    assert torch.equal(first, again)
    lengths = len(set(map(len, ROWS)))
    assert heads == [0] * (lengths - 1) + [int(scored.sum())]


def test_no_pass_waits_for_a_head_that_has_rows_enough(heads):
    model = tiny_energy_model()
    sequences, scored = sequences_of([[1, *[5] * length, 2] for length in range(1, 31)])
    with torch.no_grad():
        token_energies(model.masked_batch_runner(), sequences, scored, "raw")
        heads.clear()
        token_energies(model.masked_batch_runner(), sequences, scored, "raw")
    pools = [rows for rows in heads if rows]
    assert sum(pools) == int(scored.sum()) == 465 and len(pools) == 2
    assert 256 <= pools[0] < 256 + 30


def test_a_big_vocabulary_bounds_the_rows_of_a_head(heads):
    model = tiny_energy_model()
    sequences, scored = sequences_of(ROWS)
    runner = MaskedBatchRunner(model.masked_batch_runner().position_logits, 3, 250_000, token_budget=180)
    with torch.no_grad():
        token_energies(model.masked_batch_runner(), sequences, scored, "raw")  # checks that one head holds
        heads.clear()
        token_energies(runner, sequences, scored, "raw")
    assert max(heads) * 250_000 * 12 <= 180 * 65_536


class Altered:
    """A model's forward whose head does something that depends on which rows it gets."""

    def __init__(self, forward, fault: str):
        self.forward, self.fault = forward, fault

    def __call__(self, input_ids, **inputs):
        output = self.forward(input_ids=input_ids, **inputs)
        logits = output.logits
        if self.fault == "rows mixed":
            output.logits = logits + logits.mean(0) * (len(logits) > 1)
        elif self.fault == "rows counted":
            output.logits = logits * (1 + 0.1 * (len(logits) != len(input_ids)))
        elif self.fault == "no rows":
            logits.amax(0)
        elif self.fault == "shape":
            output.logits = logits.view(len(input_ids), -1, logits.shape[-1])
        elif self.fault == "a term of each row":
            output.logits = logits + torch.arange(9) * torch.ones(len(input_ids), 1, 1)
        elif self.fault == "length":
            output.logits = logits / input_ids.shape[1]
        return output


@pytest.mark.parametrize("fault", ["rows mixed", "rows counted", "no rows", "shape", "a term of each row", "length"])
def test_a_head_that_needs_its_own_rows_runs_once_a_length(fault, energy):
    """Found out on first use, though some pass may have one row, which is broadcast, or all may have one length."""
    model = tiny_energy_model(energy)
    # One masked row a length where a head mixes rows, so that it shows in a common head alone.
    rows = [[4, 5, 2], [1, 8, 2, 2], [4, 6, 2, 2, 2], *([] if fault == "rows mixed" else [[1, 6, 7, 2]])]
    model.mlm.forward = Altered(model.mlm.forward, fault)
    scored = [[i for i, token in enumerate(ids) if token > 4] for ids in rows]
    with torch.no_grad():
        expected = [
            sum(plain_token_energies(model, torch.tensor(ids), where)) for ids, where in zip(rows, scored, strict=True)
        ]
        if fault == "length":  # two passes of one length first, as of a text that exceeds the budget
            token_energies(model.masked_batch_runner(4), *sequences_of([[1, 6, 7, 2]]), energy)
        for _ in range(2):
            found = token_energies(model.masked_batch_runner(), *sequences_of(rows), energy).sum(1)
            assert found.tolist() == pytest.approx(expected, abs=1e-4)
    held = [
        holds for key, holds in model.masked_batch_runner().position_logits._verified.items() if key[0] == "one head"
    ]
    assert held == [True, False] if fault == "length" else held == [False]


@pytest.mark.parametrize("change", ["hook", "hook on the model", "head"])
def test_a_head_changed_after_its_first_use_is_looked_at_again(change):
    model = tiny_energy_model()
    sequences, scored = sequences_of(ROWS)
    expected = token_energies(model.masked_batch_runner(), sequences, scored, "raw").detach()
    seen = []

    class Head(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head = head

        def forward(self, hidden):
            return self.head(hidden.reshape(len(hidden), -1, hidden.shape[-1]))

    if change == "head":
        model.mlm.cls = Head(model.mlm.cls)
    elif change == "hook":
        model.mlm.cls.register_forward_hook(lambda module, inputs, output: seen.append(float(output.max())))
    else:
        model.mlm.register_forward_hook(lambda module, inputs, output: seen.append(float(output.logits.max())))
    with torch.no_grad():
        torch.testing.assert_close(token_energies(model.masked_batch_runner(), sequences, scored, "raw"), expected)
    assert change == "head" or seen


def test_states_of_encoders_are_not_held_back_for_a_head():
    """They are what weighs most: each row has a copy."""
    pools = []

    class Recorder:
        def together(self, passes):
            pools.append([one.input_ids.shape for one in passes])
            return [torch.zeros(*one.positions.shape, 9) for one in passes]

    sequences, scored = sequences_of(ROWS)
    context = Context({}, {}, torch.zeros(5, 7, 16), torch.full((5,), 7))
    token_energies(MaskedBatchRunner(Recorder(), 3, 9), replace(sequences, context=context), scored, "raw")
    assert [len(pool) for pool in pools] == [1] * len(set(map(len, ROWS)))
    pools.clear()
    token_energies(MaskedBatchRunner(Recorder(), 3, 9), sequences, scored, "raw")
    assert len(pools) == 1


def widths_of_feed_forwards(model) -> list[int]:
    """A list that fills with how many positions each feed-forward network runs at, without hooks."""
    widths = []
    for layer in model.bert.encoder.layer:
        forward = layer.intermediate.dense.forward
        layer.intermediate.dense.forward = lambda x, forward=forward: widths.append(x.shape[1]) or forward(x)
    return widths


def test_only_the_last_feed_forward_network_runs_at_one_position():
    model = tiny_mlm(layers=2)
    widths, logits = widths_of_feed_forwards(model), PositionLogits(model)
    ids, reads = torch.tensor([[1, 5, 3, 7, 2]]), (torch.tensor([[2]]), torch.tensor([[2, 3]]))
    with torch.no_grad():
        for positions in reads:  # checks that it holds
            logits(ids, positions)
        widths.clear()
        for positions in reads:
            logits(ids, positions)
    assert widths == [5, 1, 5, 5]


def test_gradients_are_taken_of_the_whole_forward_so_layers_can_be_run_again():
    model = tiny_energy_model(dtype=torch.float64, layers=2).train()
    ids = torch.tensor([[1, 5, 6, 7, 2]])
    model(ids).energy.sum().backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    layer = model.mlm.bert.encoder.layer[-1]
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    model(ids).energy.sum().backward()
    for name, gradient in plain.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)


@pytest.mark.parametrize("change", ["chunks", "hook", "hook before", "tied layers", "late mixing"])
def test_values_stay_right_whatever_becomes_of_the_model(change):
    """Feed-forward networks in chunks, and changes after the first use that make another check necessary."""
    model = tiny_mlm(layers=2, chunk_size_feed_forward=4 if change == "chunks" else 0)
    layers, logits = model.bert.encoder.layer, PositionLogits(model)

    def edit(module, inputs, output):
        return output + torch.arange(output.shape[1])[:, None]

    def mix_long(output):
        return output + output.mean(1, keepdim=True) if output.shape[1] > 8 else output

    def make_change():
        if change.startswith("hook"):
            layers[-1].intermediate.dense.register_forward_hook(edit)
        elif change == "tied layers":
            layers[1].intermediate = layers[0].intermediate

    if change == "hook before":
        make_change()
    if change == "late mixing":  # within the module's own code, where no hook shows it
        forward = layers[-1].forward
        layers[-1].forward = lambda *a, **k: mix_long(forward(*a, **k))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for run, length in enumerate((8, 16 if change == "late mixing" else 8)):
            ids = torch.randint(4, 9, (3, length), generator=generator)
            positions = torch.tensor([[1], [2], [5]])
            torch.testing.assert_close(logits(ids, positions), gather_positions(model(input_ids=ids).logits, positions))
            if run == 0 and change != "hook before":
                make_change()
    # Layers that are given chunks run on all of them, and the others' narrowing holds.
    assert change != "chunks" or all(logits._verified.values())


def test_gradients_flow_through_energies(energy):
    model = tiny_energy_model(energy, dtype=torch.float64)
    ids = torch.tensor([[1, 5, 6, 7, 2]])
    weight = model.get_input_embeddings().weight
    model(ids).energy.sum().backward()
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slope = float((weight.grad * direction).sum())
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
            values.append(float(model(ids).energy))
            weight.add_(direction, alpha=-step)
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope, rel=1e-6)


def test_attended_spans_refuses_holes_and_empty_rows():
    start, stop = attended_spans(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]))
    assert start.tolist() == [1, 0] and stop.tolist() == [3, 4]
    with pytest.raises(ValueError, match="row 1 has a hole"):
        attended_spans(torch.tensor([[1, 1, 1], [1, 0, 1]]))
    with pytest.raises(ValueError, match="row 0 attends to no position"):
        attended_spans(torch.tensor([[0, 0]]))


def test_training_keeps_dropout_and_scoring_does_not():
    model = tiny_energy_model(hidden_dropout_prob=0.3)
    ids = torch.tensor([[1, 5, 6, 7, 2]])
    model.train()
    with torch.no_grad():
        assert float(model(ids).energy) != float(model(ids).energy)
        assert torch.equal(model.score_ids(ids), model.score_ids(ids))
    assert model.training and model.mlm.training


def test_scoring_in_training_mode_encodes_contexts_without_dropout():
    from tests.models.test_families import wrap

    model = wrap("bart").train()
    assert model.mlm.config.dropout > 0
    ids, context = torch.tensor([[1, 7, 9, 2]]), torch.tensor([[5, 6, 7]])
    values = [model.score_ids(ids, encoder_input_ids=context) for _ in range(2)]
    assert torch.equal(*values)
