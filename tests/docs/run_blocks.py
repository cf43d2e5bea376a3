"""Runs blocks of Python, each in a namespace of its own, for `test_examples`: `python run_blocks.py BLOCKS.json`."""

import json
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, code in json.loads(Path(sys.argv[1]).read_text()).items():
        print(f"--- {name}", file=sys.stderr)
        exec(compile(code, name, "exec"), {})
