"""Loads what `push_run` pushed by the auto classes, for `hub_runs`; prints what each one computes as JSON.

`trusted`: with the code of the repository, in a process that must not find hf_ebm; of models of the same code, one.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers

# Their repositories hold the code that "mgs" has, byte for byte.
SAME_CODE = ("ce", "scheduled", "self-normalized", "soft-beam", "minimum-risk", "policy-gradient")


def value(model) -> float:
    """A number that depends on a model's weights."""
    ids = torch.tensor([[1, 5, 5, 2]])
    with torch.no_grad():
        model = model.eval()
        if "Energy" in type(model).__name__:
            return float(model(ids).energy.sum())
        extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        return float(model(input_ids=ids, **extra).logits[0, -1, -1])


def main(found: str, mode: str) -> None:
    trusted = mode == "trusted"
    if trusted:
        assert find_spec("hf_ebm") is None
    else:
        import hf_ebm  # noqa: F401  registers its models
    values = {}
    for name, (auto, _) in json.loads(Path(found).read_text()).items():
        if trusted and name in SAME_CODE:
            continue
        model = getattr(transformers, auto).from_pretrained(f"tester/{name}", trust_remote_code=trusted)
        values[name] = value(model)
        if trusted:  # saved again, it still loads
            model.save_pretrained(name)
            again = getattr(transformers, auto).from_pretrained(name, trust_remote_code=True)
            assert value(again) == values[name], name
        if name == "energy":
            tokenizer = transformers.AutoTokenizer.from_pretrained("tester/energy", trust_remote_code=trusted)
            out = model.generate(num_chains=2, seed=0)  # lengths and epochs from the generation settings
            values["samples"] = tokenizer.batch_decode(out.sequences)
    print(json.dumps(values))
