"""Writes what `push_to_hub` uploads, and loads it without `hf_ebm`: `python examples/publish.py --folder kjv`."""

import json
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

from hf_ebm.assets import load_embedded
from hf_ebm.publishing.cards import Sampling, model_card
from hf_ebm.publishing.hub import save_for_hub

parser = ArgumentParser(description=__doc__)
parser.add_argument("--folder", type=Path, default=Path("for-the-hub"))
parser.add_argument("--name", default="you/kjv-energy", help="of the repository, for the card")
parser.add_argument("--num_epochs", type=int, default=20, help="of the chains whose numbers the card shows")
parser.add_argument("--text", default="And God said, Let there be light")
args = parser.parse_args()

model, tokenizer = load_embedded()
out = model.generate(lengths=8, num_chains=4, num_epochs=args.num_epochs, seed=0)
card = model_card(
    model,
    name=args.name,
    sampling=Sampling.measured(out, tokenizer),
    license="apache-2.0",
    language="en",
    limits="It knows the English of 1611 and nothing else.",
)
# With a token of the Hub (`hf auth login`): model.push_to_hub(args.name, tokenizer=tokenizer, card=card, private=True)
save_for_hub(model, str(args.folder), tokenizer=tokenizer, card=card)
for path in sorted(args.folder.iterdir()):
    print(f"{path.stat().st_size:>10,} bytes  {path.name}")

program = """
import json, sys
from transformers import AutoModel, AutoTokenizer
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(json.dumps([model.score([sys.argv[2]], tokenizer).energy.tolist()[0], "hf_ebm" in sys.modules]))
"""
command = [sys.executable, "-c", program, str(args.folder), args.text]
done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
energy, with_hf_ebm = json.loads(done.stdout.splitlines()[-1])
here = float(model.score([args.text], tokenizer).energy[0])
print(f"energy {here:.4f} here, {energy:.4f} in a process that has imported hf_ebm: {with_hf_ebm}")
