"""Publishing and loading back over HTTP, against a Hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from hf_ebm import EnergyModel
from hf_ebm.publishing.remote_code import write_custom_generate
from tests.docs.hub_models import HUB_MODELS, repository
from tests.docs.test_examples import HUB
from tests.models.tokenizers_for_tests import small_model, small_tokenizer
from tests.publishing.hub_server import HubServer
from tests.publishing.load_run import SAME_CODE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SITE_PACKAGES = str(Path(pytest.__file__).parents[1])
TRAINED = {
    "ce": "CrossEntropyTrainer", "scheduled": "ScheduledSamplingTrainer", "self-normalized": "SelfNormalizedTrainer",
    "soft-beam": "SoftBeamTrainer", "mgs": "MGSTrainer", "minimum-risk": "MinimumRiskTrainer",
    "policy-gradient": "PolicyGradientTrainer", "trained-energy": "EnergyTrainer", "nce": "ResidualNCETrainer",
}  # fmt: skip


class Runs(NamedTuple):
    """The Hub after all runs, the folder with one of each, and what each pushed model computed."""

    hub: HubServer
    folder: Path
    found: dict

    def output(self, name: str) -> list[str]:
        """Lines that a run printed, which must not have failed."""
        assert (self.folder / name / "status").read_text() == "0", (self.folder / name / "stderr").read_text()[-4000:]
        return (self.folder / name / "stdout").read_text().splitlines()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Everything pushed, loaded and sampled by forks of one fresh process, of which only some find this project."""
    hub, folder = HubServer(), tmp_path_factory.mktemp("hub")
    hub.failing.add("tester/broken")
    tokenizer = small_tokenizer("wordpiece")
    small_model(tokenizer).mlm.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    names = write_custom_generate(folder / "sampler")
    hub.files["tester/sampler"] = {name: (folder / "sampler" / name).read_bytes() for name in names}
    hub.commits["tester/sampler"] = []
    for name in HUB_MODELS:
        hub.files[name], hub.commits[name] = repository(name), []
    (folder / "blocks.json").write_text(json.dumps(HUB))
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_token", "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": SITE_PACKAGES, "TQDM_DISABLE": "1",
    }  # fmt: skip
    # Without what is installed by path: this project.
    command = [sys.executable, "-S", str(ROOT / "tests/publishing/hub_runs.py"), str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = folder / "pushed" / "found.json"
    all_runs = Runs(hub, folder, json.loads(found.read_text()) if found.exists() else {})
    all_runs.output("pushed")
    yield all_runs
    hub.close()


@pytest.mark.parametrize("mode", ["installed", "trusted"])
def test_everything_loads_back_and_computes_the_same(runs, mode):
    *_, last = runs.output(mode)
    loaded = json.loads(last)
    samples = loaded.pop("samples")
    wanted = {name: value for name, (_, value) in runs.found.items() if mode == "installed" or name not in SAME_CODE}
    assert loaded == {name: pytest.approx(value, rel=1e-6) for name, value in wanted.items()}
    assert len(set(loaded.values())) > (10 if mode == "installed" else 7)  # the number tells models apart
    assert len(samples) == 2 and all(text.startswith("[CLS]") and text.endswith("[SEP]") for text in samples)


def test_models_of_one_class_have_the_same_code(runs):
    def code(name: str) -> tuple:
        files = runs.hub.files[f"tester/{name}"]
        sources = {path: data for path, data in files.items() if path.endswith(".py")}
        return sources, json.loads(files["config.json"])["auto_map"]

    assert all(code(name) == code("mgs") for name in SAME_CODE) and code("mgs") != code("energy")


def test_each_repository_has_what_it_needs(runs):
    hub, _, found = runs
    for name in found:
        files = hub.files[f"tester/{name}"]
        assert {"config.json", "model.safetensors", "README.md", "modeling_hf_ebm.py"} <= set(files)
        assert not any(path.endswith((".bin", ".pt", ".pkl")) and path != "training_args.bin" for path in files)
        assert json.loads(files["config.json"])["auto_map"]["AutoConfig"].startswith("modeling_hf_ebm.")
        texts = b"\n".join(data for path, data in files.items() if path.endswith((".py", ".json", ".md")))
        assert str(ROOT).encode() not in texts and b"_name_or_path" not in files["config.json"]
    assert {"generation_config.json", "tokenizer.json"} <= set(hub.files["tester/energy"])
    assert {"tokenizer.json"} <= set(hub.files["tester/soft-beam"])
    assert set(hub.unknown) <= {("GET", "/api/agent-harnesses")}


def test_cards_state_what_was_run(runs):
    hub = runs.hub
    for name, trainer in TRAINED.items():
        text = hub.files[f"tester/{name}"]["README.md"].decode()
        card = ModelCard(text)
        assert f"`{trainer}`" in text and "| seed | 7 |" in text and "| steps | 1 (" in text
        assert ("```bibtex" in text) == (name != "ce")  # the baseline has no paper of its own
        assert f'from_pretrained("tester/{name}"' in text
        assert card.data.library_name == "transformers" and "hf_ebm" in card.data.tags
        if name in ("trained-energy", "nce"):
            continue
        assert card.data.license == "mit" and "made up" in text and "4 rows" in text
        assert {result.metric_type for result in card.data.eval_results} >= {"eval_loss", "train_loss"}
    energy = hub.files["tester/energy"]["README.md"].decode()
    assert (
        "Split R-hat" in energy and "`num_epochs=6`" in energy and "How the model was trained is not stated" in energy
    )
    assert "| beam_size | 2 |" in hub.files["tester/soft-beam"]["README.md"].decode()
    assert "pushed" in ModelCard(hub.files["tester/lstm"]["README.md"].decode()).data.tags


def test_cards_fit_the_hubs_schema(runs):
    """What the Hub's own check demands of metadata: known types, and complete results."""
    hub, _, found = runs
    for name in found:
        header = yaml.safe_load(hub.files[f"tester/{name}"]["README.md"].decode().split("---")[1])
        assert all(isinstance(tag, str) for tag in header["tags"])
        for entry in header.get("model-index", []):
            assert entry["name"]
            for result in entry["results"]:
                assert result["task"]["type"] and {"type", "name"} <= set(result["dataset"])
                assert all(isinstance(metric["value"], float) and metric["type"] for metric in result["metrics"])


def test_a_broken_upload_leaves_the_checkpoint_whole(runs):
    hub, folder = runs.hub, runs.folder / "pushed"
    broken = json.loads((folder / "broken.json").read_text())
    assert len(broken["messages"]) == 2 and set(hub.files["tester/broken"]) == {".gitattributes"}
    assert "in out are whole; call push_to_hub again" in broken["messages"][0]
    assert "the model in memory is unchanged; call push_to_hub again" in broken["messages"][1]
    assert broken["same"]
    assert (folder / "out" / "README.md").exists() and (folder / "out" / "modeling_hf_ebm.py").exists()


def test_sampling_is_published_as_custom_generate(runs):
    """From a folder and from the Hub."""
    files = runs.hub.files["tester/sampler"]
    assert {"custom_generate/generate.py", "custom_generate/requirements.txt", "README.md"} <= set(files)
    assert ModelCard(files["README.md"].decode()).data.tags[0] == "custom_generate"
    tokenizer = AutoTokenizer.from_pretrained(runs.folder / "model")
    prompt = tokenizer("the [MASK] sat on the [MASK]", return_tensors="pt")
    inputs = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    model = EnergyModel.from_pretrained(runs.folder / "model")
    expected = model.generate(**inputs, num_chains=2, num_epochs=3, seed=0)
    lines = runs.output("generated")
    assert lines.count(f"BERT {expected.sequences.tolist()}") == lines.count("BART (2, 6) 3") == 2
    assert sum(line.startswith("ERROR tokenizer must be given") for line in lines) == 2


@pytest.mark.docs
def test_blocks_of_python_with_hub_models_run(runs):
    """Of the README and the guides; the models are stand-ins of their names."""
    lines = runs.output("documented")
    assert [line for line in lines if line.startswith("--- ")] == [f"--- {name}" for name in HUB]
    assert len(HUB) >= 5
