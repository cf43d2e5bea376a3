"""Modules for `evaluate.load`, a folder each: `<name>/<name>.py` and its card, `<name>/README.md`::

    evaluate.load(module_path("edit_distance"))

`evaluate` runs a copy of the one file, so a module imports the library by its full name and holds no mathematics of its
own. `shared.py` holds what predictions and references may be, and the model that scores texts.
"""

from __future__ import annotations

from pathlib import Path

from hf_ebm.checks import check_choice
from hf_ebm.renamed import rename_modules

# Modules that were copied elsewhere import these.
rename_modules(__name__, {"inputs": f"{__name__}.shared", "scoring": f"{__name__}.shared"})

MODULES = (
    "edit_distance",
    "energy_gap",
    "non_termination",
    "novel_rate",
    "phoneme_error_rate",
    "pseudo_perplexity",
    "repetition",
)


def module_path(name: str) -> str:
    """The folder of a module, to hand to `evaluate.load`.

    Raises:
        ValueError: for a name that isn't in `MODULES`.
    """
    check_choice("name", name, MODULES)
    return str(Path(__file__).parent / name)
