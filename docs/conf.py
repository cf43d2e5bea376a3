"""Sphinx settings of the documentation: `make docs` builds it with warnings as errors, without a network."""

import dataclasses
import inspect

from docutils import nodes
from latex2mathml.converter import convert
from transformers import TrainingArguments

import hf_ebm

project = "hf_ebm"
author = "the hf_ebm developers"
release = version = hf_ebm.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "results/quick", "results/work", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_math_renderer = "mathml"  # browsers draw it themselves: no script from elsewhere
html_title = f"hf_ebm {release}"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are shown as they were run; the tests run them again

default_role = "code"  # docstrings mark code by single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay readable; docstrings say shapes and dtypes
autodoc_default_options = {"show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True


def own_fields_only(app, what, name, obj, options, signature, returned):
    """A configuration's signature without the hundred fields it inherits from `TrainingArguments`."""
    if what != "class" or not dataclasses.is_dataclass(obj) or not issubclass(obj, TrainingArguments):
        return None
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    parameters = [p for p in inspect.signature(obj).parameters.values() if p.name not in inherited]
    plain = ["output_dir=None", *(f"{p.name}={p.default!r}" for p in parameters), "**training_arguments"]
    return f"({', '.join(plain)})", returned


def inline_math(translator, node):
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display_math(translator, node):
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(display_math, None))
    app.connect("autodoc-process-signature", own_fields_only)
