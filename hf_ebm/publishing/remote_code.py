"""The code of a model beside its weights, so that `AutoModel…` loads it where `hf_ebm` isn't installed.

Transformers fetches the file that `auto_map` names and what it imports from files beside it, no folders. So the
definitions that a model needs are written, as they stand, to a file for each module, under flat names, and imports from
`hf_ebm` become relative ones.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
import os
import re
import textwrap
from collections.abc import Iterable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel

from hf_ebm.checks import as_path, check_choice

PACKAGE = __name__.partition(".")[0]
ENTRY = "modeling_hf_ebm"
REGISTRATION = f"{PACKAGE}.registration"
# Not part of a model: what publishes one is asked for only where this package is installed.
_LEFT_OUT = f"{PACKAGE}.publishing"
# Methods of models, `name = name` in the class, that are there only where this package is installed: who trusts remote
# code has to read all of it.
_METHODS_LEFT_OUT = frozenset(
    {"generate_from_sources", "log_partition", "pair_joints", "perplexity", "sample_smc", "score_variants", "summary"}
)
_ALL_BUT_GENERATE = _METHODS_LEFT_OUT | {"fill", "rerank", "score", "score_ids"}
# Examples in docstrings import what isn't published.
_EXAMPLE = re.compile(r"\n+( *)Example:\n(?:\1 .*\n|\n)+")
_IMPORT = re.compile(rf"^(\s*)from ({PACKAGE}\.(?!publishing)[\w.]*) import ", re.MULTILINE)


def write_remote_code(folder: str | os.PathLike, model: PreTrainedModel) -> list[str]:
    """Writes the modules that define a model, and the models inside it, and names them in its `config.json`.

    Args:
        folder: where `save_pretrained` has written the model.
        model: of a class of this package.

    Returns:
        Names of the files written.

    Raises:
        ValueError: for a model that isn't of this package, or a folder without its configuration.
    """
    root = as_path("folder", folder)
    if not is_own(type(model)):
        raise ValueError(f"model must be of a class of {PACKAGE}, got {type(model).__module__}.{type(model).__name__}")
    if not (root / "config.json").is_file():
        raise ValueError(f"folder: {root} holds no config.json; save the model there first")
    inside = {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    classes = [type(model), *sorted((c for c in inside - {type(model)} if is_own(c)), key=lambda c: c.__name__)]
    config_class = type(model).config_class
    if config_class is None:
        raise ValueError(f"model: {type(model).__name__} states no config_class")
    needed: list[type] = [config_class, *classes]
    written = {f"{ENTRY}.py": _entry(needed, classes[1:])}
    wanted = [(c.__module__, c.__name__) for c in needed] + [(REGISTRATION, "register")]
    written |= {f"{_flat(name)}.py": text for name, text in _copies(wanted, _METHODS_LEFT_OUT).items()}
    for file, text in written.items():
        (root / file).write_text(text, encoding="utf-8")
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": f"{ENTRY}.{config_class.__name__}"}
    config["auto_map"] |= {name: f"{ENTRY}.{classes[0].__name__}" for name in auto_classes(type(model))}
    (root / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return sorted(written)


def _entry(needed: list[type], inside: list[type]) -> str:
    """The file that `auto_map` names: imports what the model needs, and registers the models inside it."""
    lines = [f'"""Entry of the code of {PACKAGE}, flattened for `trust_remote_code`."""', ""]
    found = {model_class: auto_classes(model_class, required=False) for model_class in inside}
    autos = sorted({name for names in found.values() for name in names})
    if autos:
        lines += [f"from transformers import {', '.join(autos)}", "", f"from .{_flat(REGISTRATION)} import register"]
    lines += [f"from .{_flat(c.__module__)} import {c.__name__}  # noqa: F401" for c in needed]
    for model_class, names in found.items():
        if names:
            classes = ", ".join(f"{name}: {model_class.__name__}" for name in names)
            config = f"{model_class.__name__}.config_class"
            lines.append(f"register({config}, {{{classes}}}, inside_a_checkpoint=True)")
    return "\n".join([*lines, ""])


# Where each `generate` stands that `write_custom_generate` knows, and the card beside it.
CUSTOM_GENERATE = {
    "sampler": (f"{PACKAGE}.models.energy.custom_generate", "sampler.md"),
    "mbr": (f"{PACKAGE}.models.minimum_bayes_risk", "minimum_bayes_risk.md"),
}


def write_custom_generate(folder: str | os.PathLike, method: str = "sampler") -> list[str]:
    """Writes `custom_generate/generate.py` and what it imports, as Transformers' models load it from the Hub.

    Args:
        folder: of a repository, new or not; a card is written as its README.md if there is none.
        method: `"sampler"`, chains of a masked language model, or `"mbr"`, minimum Bayes risk decoding.

    Raises:
        ValueError: for another method.

    Returns:
        Names of the files written.
    """
    root = as_path("folder", folder)
    check_choice("method", method, CUSTOM_GENERATE)
    start, card_of_method = CUSTOM_GENERATE[method]
    target = root / "custom_generate"
    target.mkdir(parents=True, exist_ok=True)
    copies = _copies([(start, "generate")], _ALL_BUT_GENERATE).items()
    written = {"generate.py" if name == start else f"{_flat(name)}.py": text for name, text in copies}
    for file, text in written.items():
        (target / file).write_text(text, encoding="utf-8")
    (target / "requirements.txt").write_text("torch>=2.6\ntransformers>=5.24\nnumpy\nsafetensors\n", encoding="utf-8")
    card = root / "README.md"
    if not card.exists():
        template = resources.files("hf_ebm.hub_cards") / card_of_method
        card.write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    return sorted([*(f"custom_generate/{name}" for name in written), "custom_generate/requirements.txt", "README.md"])


def is_own(model_class: type) -> bool:
    """Whether a class is this package's, installed."""
    return _is_ours(model_class.__module__)


def auto_classes(model_class: type, required: bool = True) -> list[str]:
    """Names of the auto classes that make this class; `ValueError` if there is none though one is required."""
    found = []
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM):
        config_class = getattr(model_class, "config_class", None)
        made = auto._model_mapping.get(config_class, None) if config_class else None
        if model_class in (made if isinstance(made, tuple) else (made,)):
            found.append(auto.__name__)
    if required and not found:
        raise ValueError(f"model: no auto class makes a {model_class.__name__}")
    return found


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _copies(wanted: Iterable[tuple[str, str]], without: frozenset[str]) -> dict[str, str]:
    """Sources by module of definitions, (module, name) each, and of what they need of the package, at whatever depth.

    A module's other definitions and imports, methods `without` these, what is for type checkers alone and examples are
    left out; statements that bind no name (a docstring, a registration) stay. Imports are made relative.
    """
    kept: dict[str, set[str]] = {}
    waiting = list(wanted)
    while waiting:
        module, name = waiting.pop()
        if name in kept.setdefault(module, set()):
            continue
        kept[module].add(name)
        waiting.append((module, _NO_NAME))
        for node, bound, _ in _statements(module, without):
            if name in bound:
                waiting += _needed(module, node, name)
    return {module: _source(module, names, without) for module, names in sorted(kept.items())}


_NO_NAME = ""


@functools.cache
def _statements(module: str, without: frozenset[str]) -> list[tuple[ast.stmt, set[str], str]]:
    """The statements of a module's top level that are run: each with the names it binds, and its lines and comments."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module} has no source")
    source = Path(spec.origin).read_text(encoding="utf-8")
    lines, end, found = source.splitlines(keepends=True), 0, []
    for node in ast.parse(source).body:
        own, first, end = end, end, node.end_lineno or end
        if isinstance(node, ast.ClassDef):
            for method in [one for one in node.body if _is_method_of(one, without)]:
                node.body.remove(method)
                lines[method.lineno - 1] = ""
        if not isinstance(node, ast.If) or not isinstance(node.test, ast.Name) or node.test.id != "TYPE_CHECKING":
            found.append((node, _bound(node), "".join(lines[own:end])))
            continue
        for inner in node.orelse:
            first = min([inner.lineno, *(one.lineno for one in getattr(inner, "decorator_list", []))]) - 1
            text = textwrap.dedent("".join(lines[first : inner.end_lineno]))
            found.append((inner, _bound(inner), f"\n\n{text}"))
    return found


def _is_method_of(node: ast.stmt, names: frozenset[str]) -> bool:
    """Whether a statement in a class makes one of these functions a method: `name = name`."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)):
            return name == value and name in names
    return False


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement gives a meaning to, or changes; `_NO_NAME` for one that must stay without any."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
        return {_NO_NAME}
    found = set()
    for one in ast.walk(node):
        match one:
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
    return found


@functools.cache
def _needed(module: str, node: ast.stmt, name: str) -> set[tuple[str, str]]:
    """What a statement reads, that of an import for one of its names."""
    found = set()
    for one in ast.walk(node):
        match one:
            case ast.Name(id=read):
                found.add((module, read))
            case ast.Import(names=aliases) if any(_is_ours(alias.name) for alias in aliases):
                raise ValueError(f"{module} imports {PACKAGE} as a whole, which can't be made relative")
            case ast.ImportFrom(module=str(source)) if _is_ours(source) and not source.startswith(_LEFT_OUT):
                found |= {
                    (source, alias.name) for alias in one.names if one is not node or name in (alias.name, alias.asname)
                }
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def _source(module: str, names: set[str], without: frozenset[str]) -> str:
    """What a module's source says of these names, with imports from beside it in place of those from the package."""
    parts = []
    for node, bound, text in _statements(module, without):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and bound & names and not bound <= names:
            fewer = copy.copy(node)
            fewer.names = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in names]
            text = f"{ast.unparse(fewer)}\n"
        parts += [text] if bound & names else []
    text = _EXAMPLE.sub("\n", "".join(parts))
    return _IMPORT.sub(lambda found: f"{found[1]}from .{_flat(found[2])} import ", text)
