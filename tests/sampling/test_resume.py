"""Runs that are saved, interrupted, resumed and made longer; states that are damaged."""

import hashlib
import json
import types

import pytest
import torch
from safetensors.torch import save

from hf_ebm.models.energy import saved_runs
from hf_ebm.models.energy.saved_runs import SavedRun, holds_run
from hf_ebm.sampling.kernels import KERNELS
from tests.conftest import tiny_energy_model
from tests.sampling.chains import BASE, VARIED, StopAfter, equal


@pytest.mark.parametrize("extra", [VARIED[1], VARIED[2], VARIED[5]])
def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path, extra):
    model = tiny_energy_model()
    settings = BASE | {"num_epochs": 6} | extra
    whole = model.generate(**settings)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**settings, save_state_to=tmp_path, stopping_criteria=[StopAfter(2, KeyboardInterrupt)])
    assert SavedRun.load(tmp_path).epoch == 2
    rest = model.generate(resume_from=tmp_path, save_state_to=tmp_path)
    assert equal(whole, rest)
    # Rows that were kept to be read again aren't saved; each is run once more at most.
    assert whole.num_masked_rows <= rest.num_masked_rows <= whole.num_masked_rows + int(whole.run.free.sum())
    for name in whole.trace._fields:
        torch.testing.assert_close(getattr(whole.trace, name), getattr(rest.trace, name))


@pytest.mark.parametrize("extra", [{"accept_all_epochs": 1}, *VARIED[:4], *VARIED[5:]])
def test_a_run_that_is_killed_within_an_epoch_goes_on_there(tmp_path, monkeypatch, extra):
    model = tiny_energy_model()
    settings = BASE | {"num_epochs": 2} | extra
    whole = model.generate(**settings)
    steps: list[tuple[int, int]] = []

    def killed_at_the_third_step(self, run):
        steps.append((run.epoch, run.step))
        if len(steps) == 4:  # the first is that of the start
            raise KeyboardInterrupt

    monkeypatch.setattr(saved_runs.Saver, "save_if_due", killed_at_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**settings, save_state_to=tmp_path)
    saved = SavedRun.load(tmp_path)
    assert (saved.epoch, saved.step) == steps[3]
    rest = model.generate(resume_from=tmp_path)
    assert equal(whole, rest) and len(set(steps)) == len(steps)  # no step was taken twice
    for name in whole.trace._fields:
        torch.testing.assert_close(getattr(whole.trace, name), getattr(rest.trace, name))


def test_a_state_within_an_epoch_is_of_its_target_and_its_epochs(tmp_path, monkeypatch):
    def killed(self, run):
        if run.epoch == 1 and run.step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(saved_runs.Saver, "save_if_due", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny_energy_model().generate(**BASE, save_state_to=tmp_path, extra_energies=lambda ids: ids[:, 2].double())
    with pytest.raises(ValueError, match="extra energies of the saved chains are not"):
        tiny_energy_model().generate(resume_from=tmp_path, extra_energies=lambda ids: ids[:, 1].double())
    with pytest.raises(ValueError, match="1 epochs are done, num_epochs=1 is less"):
        tiny_energy_model().generate(resume_from=tmp_path, num_epochs=1)


@pytest.mark.parametrize("step_seconds, saving_seconds, expected", [(0.4, 0.01, 3), (3.0, 0.1, 1), (3.0, 0.55, 4)])
def test_a_state_is_saved_every_second_and_for_a_twentieth_of_the_time(
    tmp_path, monkeypatch, step_seconds, saving_seconds, expected
):
    """By a clock that runs for steps and saves alone: a state is saved every so many steps."""
    now, saved = 0.0, []
    kernel, save = KERNELS["metropolis_hastings"], SavedRun.save

    def slow_step(*given, **settings):
        nonlocal now
        now += step_seconds
        return kernel.step(*given, **settings)

    def slow_save(run, path):
        nonlocal now
        now += saving_seconds
        saved.append(4 * run.epoch + run.step)
        save(run, path)

    monkeypatch.setitem(KERNELS, "metropolis_hastings", kernel._replace(step=slow_step))
    monkeypatch.setattr(SavedRun, "save", slow_save)
    monkeypatch.setattr(saved_runs, "time", types.SimpleNamespace(monotonic=lambda: now))
    tiny_energy_model().generate(lengths=4, num_chains=2, num_epochs=3, seed=0, save_state_to=tmp_path)
    assert saved == [0, *range(expected, 13, expected), 12]  # at the start, as it goes, at the end


def test_constraints_are_to_be_given_again(tmp_path):
    """Where they are met their energy is 0, and what the saved energies say is the same without them."""
    model, never = tiny_energy_model(), lambda ids: torch.where((ids == 5).any(1), torch.inf, 0.0)
    settings = {**BASE, "num_epochs": 20, "extra_energies": [(2.0, never), (0.0, len)]}
    assert bool(model.generate(**settings, save_state_to=tmp_path).satisfied[:, -1].all())
    for given in (None, never, [(3.0, never)], [(2.0, never), (1.0, never)]):
        with pytest.raises(ValueError, match=r"extra_energies of the weights \[2.0\], got \["):
            model.generate(resume_from=tmp_path, num_epochs=21, extra_energies=given)
    assert model.generate(resume_from=tmp_path, num_epochs=21, extra_energies=[(2.0, never)]).run.epoch == 21


def test_a_finished_run_can_be_made_longer(tmp_path):
    model = tiny_energy_model()
    model.generate(**BASE, save_state_to=tmp_path)
    assert equal(model.generate(**BASE | {"num_epochs": 9}), model.generate(resume_from=tmp_path, num_epochs=9))
    with pytest.raises(ValueError, match="saved run has block_size=1, not 2"):
        model.generate(resume_from=tmp_path, block_size=2)
    with pytest.raises(ValueError, match="of a model with other weights; load"):
        tiny_energy_model(seed=1).generate(resume_from=tmp_path, num_epochs=9)
    with pytest.raises(ValueError, match="samples 'local', this model 'raw'"):
        tiny_energy_model("raw").generate(resume_from=tmp_path)


def written_before(folder, run) -> None:
    """A run as the versions wrote it that had two files for it."""
    tensors, values = run.parts()
    values["recipe"] = values.pop("run_config")
    blob = save(tensors)
    digest = hashlib.sha256(blob).hexdigest()
    header = {"format": 2, **values, "tensors": f"chains-{digest[:16]}.safetensors", "sha256": digest}
    header["header_sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    folder.mkdir()
    (folder / header["tensors"]).write_bytes(blob)
    (folder / "state.json").write_text(json.dumps(header, indent=2))


def test_a_run_is_one_file_and_those_of_earlier_versions_go_on(tmp_path):
    model = tiny_energy_model()
    out = model.generate(**BASE, save_state_to=tmp_path / "now")
    assert [path.name for path in (tmp_path / "now").iterdir()] == ["run.safetensors"]
    written_before(tmp_path / "before", out.run)
    assert holds_run(tmp_path / "before") and holds_run(tmp_path / "now") and not holds_run(tmp_path)
    rest = model.generate(resume_from=tmp_path / "before", save_state_to=tmp_path / "before", num_epochs=9)
    assert equal(model.generate(**BASE | {"num_epochs": 9}), rest)
    assert [path.name for path in (tmp_path / "before").iterdir()] == ["run.safetensors"]
    assert SavedRun.load(tmp_path / "before").epoch == 9


def test_damaged_and_unwritable_states_are_refused(tmp_path):
    model = tiny_energy_model()
    out = model.generate(**BASE, save_state_to=tmp_path / "state")
    file = tmp_path / "state" / "run.safetensors"
    whole = file.read_bytes()
    damaged = [whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1]), b"", save(out.run.parts()[0])]
    for content in (*damaged, whole.replace(rb"\"epoch\": 4", rb"\"epoch\": 3")):
        assert content != whole
        file.write_bytes(content)
        with pytest.raises(ValueError, match="holds no complete state"):
            model.generate(resume_from=tmp_path / "state")
    written_before(tmp_path / "before", out.run)
    header = (tmp_path / "before" / "state.json").read_text()
    for content in (header[:-20], header.replace('"epoch": 4', '"epoch": 3'), header.replace("chains-", "chain-")):
        assert content != header
        (tmp_path / "before" / "state.json").write_text(content)
        with pytest.raises(ValueError, match="holds no complete state"):
            model.generate(resume_from=tmp_path / "before")
    with pytest.raises(ValueError, match="holds no complete state"):
        model.generate(resume_from=tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="save_state_to: cannot write"):
        model.generate(**BASE, save_state_to=tmp_path / "file" / "below")


def test_unwritable_state_folder_costs_no_work(tmp_path, rows_run):
    model = tiny_energy_model()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="save_state_to: cannot write"):
        model.generate(**BASE, save_state_to=tmp_path / "file")
    assert not rows_run


def test_resuming_checks_every_chains_extra_energy(tmp_path):
    model = tiny_energy_model()
    nothing = lambda ids: torch.zeros(len(ids))  # noqa: E731
    out = model.generate(**BASE | {"num_chains": 6}, save_state_to=tmp_path, extra_energies=nothing)
    token = int(out.sequences[0, 3])

    def as_the_first_chain(ids):
        return torch.where(ids[:, 3] == token, 0.0, torch.inf).double()

    assert as_the_first_chain(out.sequences).isinf().any()
    with pytest.raises(ValueError, match="extra energies of the saved chains"):
        model.generate(resume_from=tmp_path, num_epochs=6, extra_energies=[(1.0, as_the_first_chain)])
    for given in ({"chain_keys": [(0, 5)]}, {"free_mask": torch.ones(1, 6)}, {"input_ids": torch.ones(1, 6).long()}):
        with pytest.raises(ValueError, match="leave out"):
            model.generate(resume_from=tmp_path, **given)
    with pytest.raises(ValueError, match="4 epochs are done, num_epochs=2 is less"):
        model.generate(resume_from=tmp_path, num_epochs=2)


def test_an_interruption_at_any_moment_leaves_a_state_that_resumes(tmp_path):
    """Interrupts at every line of the epoch's bookkeeping; whatever was saved goes on to the same end."""
    import sys

    model = tiny_energy_model()
    settings = dict(lengths=3, num_chains=2, num_epochs=3, seed=5)
    whole = model.generate(**settings)
    interrupted = 0
    for stop_at in range(0, 60, 7):
        seen = 0

        def trace(frame, event, argument):
            nonlocal seen
            if frame.f_code.co_name not in ("run_epoch", "_with_epoch"):
                return None
            if event == "line":
                seen += 1
                if seen == 40 + stop_at:  # noqa: B023
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            model.generate(**settings, save_state_to=tmp_path / str(stop_at))
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert equal(whole, model.generate(resume_from=tmp_path / str(stop_at)))
    assert interrupted == 9  # every time


def test_encoder_decoder_chains_resume_with_their_context(tmp_path):
    from tests.models.test_families import wrap

    model = wrap("bart")
    context = {"encoder_input_ids": torch.tensor([[7, 8, 9]])}
    settings = dict(lengths=3, num_chains=2, seed=0, **context)
    whole = model.generate(num_epochs=5, **settings)
    model.generate(num_epochs=2, save_state_to=tmp_path, **settings)
    assert equal(whole, model.generate(resume_from=tmp_path, num_epochs=5))
    with pytest.raises(ValueError, match="encoder_input_ids: row 0 has 200 tokens"):
        model.generate(lengths=2, encoder_input_ids=torch.full((1, 200), 5))
