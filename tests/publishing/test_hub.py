"""Publishing and loading back over HTTP, against a Hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.publishing.hub_server import HubServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SITE_PACKAGES = str(Path(pytest.__file__).parents[1])
TRAINED = {
    "ce": "CrossEntropyTrainer", "scheduled": "ScheduledSamplingTrainer", "self-normalized": "SelfNormalizedTrainer",
    "soft-beam": "SoftBeamTrainer", "mgs": "MGSTrainer", "minimum-risk": "MinimumRiskTrainer",
    "policy-gradient": "PolicyGradientTrainer", "trained-energy": "EnergyTrainer", "nce": "ResidualNCETrainer",
}  # fmt: skip


def run(hub: HubServer, home: Path, *arguments: str, alone: bool = False) -> subprocess.CompletedProcess:
    """A fresh process of this Hub; `alone` without what is installed by path: this project."""
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_token", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": SITE_PACKAGES if alone else str(ROOT), "TQDM_DISABLE": "1",
    }  # fmt: skip
    command = [sys.executable, *(["-S"] if alone else []), *arguments]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The Hub after everything has been pushed, and what each model computed."""
    hub, folder = HubServer(), tmp_path_factory.mktemp("pushed")
    hub.failing.add("tester/broken")
    done = run(hub, folder, str(ROOT / "tests/publishing/push_run.py"), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    yield hub, folder, json.loads((folder / "found.json").read_text())
    hub.close()


@pytest.mark.parametrize("mode", ["installed", "trusted"])
def test_everything_loads_back_and_computes_the_same(published, tmp_path, mode):
    hub, folder, found = published
    script = str(ROOT / "tests/publishing/load_run.py")
    done = run(hub, tmp_path, script, str(folder / "found.json"), mode, alone=mode == "trusted")
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = json.loads(done.stdout.splitlines()[-1])
    samples = loaded.pop("samples")
    assert loaded == {name: pytest.approx(value, rel=1e-6) for name, (_, value) in found.items()}
    assert len(set(loaded.values())) > 10  # the number tells models apart
    assert len(samples) == 2 and all(text.startswith("[CLS]") and text.endswith("[SEP]") for text in samples)


def test_each_repository_has_what_it_needs(published):
    hub, _, found = published
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


def test_cards_state_what_was_run(published):
    hub, _, _ = published
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


def test_cards_fit_the_hubs_schema(published):
    """What the Hub's own check demands of metadata: known types, and complete results."""
    hub, _, found = published
    for name in found:
        header = yaml.safe_load(hub.files[f"tester/{name}"]["README.md"].decode().split("---")[1])
        assert all(isinstance(tag, str) for tag in header["tags"])
        for entry in header.get("model-index", []):
            assert entry["name"]
            for result in entry["results"]:
                assert result["task"]["type"] and {"type", "name"} <= set(result["dataset"])
                assert all(isinstance(metric["value"], float) and metric["type"] for metric in result["metrics"])


def test_a_broken_upload_leaves_the_checkpoint_whole(published):
    hub, folder, _ = published
    broken = json.loads((folder / "broken.json").read_text())
    assert len(broken["messages"]) == 2 and set(hub.files["tester/broken"]) == {".gitattributes"}
    assert "in out are whole; call push_to_hub again" in broken["messages"][0]
    assert "the model in memory is unchanged; call push_to_hub again" in broken["messages"][1]
    assert broken["same"]
    assert (folder / "out" / "README.md").exists() and (folder / "out" / "modeling_hf_ebm.py").exists()


GENERATE = """
import sys
import torch
from importlib.util import find_spec
from transformers import AutoModelForMaskedLM, AutoTokenizer, GenerationMixin

assert find_spec("hf_ebm") is None
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
bert = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
prompt = tokenizer("the [MASK] sat on the [MASK]", return_tensors="pt")
settings = dict(tokenizer=tokenizer, num_chains=2, num_epochs=3, seed=0)
from transformers import BartConfig, BartForConditionalGeneration
torch.manual_seed(0)
bart = BartForConditionalGeneration(BartConfig(
    vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=2, eos_token_id=3, decoder_start_token_id=3)).eval()
for repository in sys.argv[2:]:
    generate = GenerationMixin.load_custom_generate(None, repository, trust_remote_code=True)
    out = generate(bert, input_ids=prompt.input_ids, attention_mask=prompt.attention_mask, **settings)
    print("BERT", out.sequences.tolist())
    out = bart.generate(prompt.input_ids, custom_generate=repository, trust_remote_code=True, lengths=4, **settings)
    print("BART", tuple(out.sequences.shape), out.energies.shape[1])
    try:
        generate(bert, input_ids=prompt.input_ids)
    except ValueError as error:
        print("ERROR", error)
"""


def test_sampling_is_published_as_custom_generate(tmp_path):
    """From a folder and from the Hub."""
    from hf_ebm import EnergyModel
    from hf_ebm.publishing.remote_code import write_custom_generate
    from tests.models.tokenizers_for_tests import small_model, small_tokenizer

    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    model.mlm.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    names = write_custom_generate(tmp_path / "sampler")
    assert {"custom_generate/generate.py", "custom_generate/requirements.txt", "README.md"} <= set(names)
    assert ModelCard.load(tmp_path / "sampler" / "README.md").data.tags[0] == "custom_generate"
    hub = HubServer()
    files = {name: (tmp_path / "sampler" / name).read_bytes() for name in names}
    hub.files["tester/sampler"], hub.commits["tester/sampler"] = files, []
    repositories = [str(tmp_path / "sampler"), "tester/sampler"]
    done = run(hub, tmp_path, "-c", GENERATE, str(tmp_path / "model"), *repositories, alone=True)
    hub.close()
    assert done.returncode == 0, done.stderr[-4000:]
    prompt = tokenizer("the [MASK] sat on the [MASK]", return_tensors="pt")
    inputs = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    expected = EnergyModel.from_pretrained(tmp_path / "model").generate(**inputs, num_chains=2, num_epochs=3, seed=0)
    lines = done.stdout.splitlines()
    assert lines.count(f"BERT {expected.sequences.tolist()}") == lines.count("BART (2, 6) 3") == len(repositories)
    assert sum(line.startswith("ERROR tokenizer must be given") for line in lines) == len(repositories)
