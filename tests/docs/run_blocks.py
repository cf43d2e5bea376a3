"""Runs blocks of Python, each in a namespace of its own, for `hub_runs`."""

import json
from pathlib import Path


def main(blocks: str) -> None:
    for name, code in json.loads(Path(blocks).read_text()).items():
        print(f"--- {name}")
        exec(compile(code, name, "exec"), {})
