"""A setting is declared once: its default, check, entry in the docstring, option and saved form follow."""

import pytest
from transformers import HfArgumentParser

from hf_ebm import ChainGenerationConfig, JointGenerationConfig
from hf_ebm.cli.commands import setting_options
from hf_ebm.generation_settings import GenerationSettings, Setting, setting
from hf_ebm.models.residual.generation_residual import METHODS
from hf_ebm.sampling.blocks import LAYOUTS, ORDERS
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.proposals import FILLS
from hf_ebm.sampling.warm_start import WARM_STARTS

COLOURS = {"red": "is warm", "blue": "is cold"}


class PaintSettings(GenerationSettings):
    """Settings of paint."""

    colour: Setting[str] = setting("red", "Its colour:", choices=COLOURS)
    coats: Setting[int] = setting(2, "How often it is painted.", least=1)
    share: Setting[float | None] = setting(None, "Share of water.", least=0, below=1)
    glossy: Setting[bool] = setting(False, "Whether it shines.")
    numbers: Setting[int | list[int]] = setting(3, "Numbers of walls.", check=lambda name, value: value)


def test_a_declaration_is_all_that_a_setting_needs(tmp_path):
    assert PaintSettings.defaults == {"colour": "red", "coats": 2, "share": None, "glossy": False, "numbers": 3}
    saved = PaintSettings(coats=4, share=0.5, numbers=[1, 2])
    saved.save_pretrained(tmp_path)
    found = PaintSettings.from_pretrained(tmp_path)
    assert found.settings() == {"coats": 4, "share": 0.5, "numbers": [1, 2]} and found.colour is None
    whole = PaintSettings(colour="blue").resolved(found, {"share": 0.25})
    assert whole.settings() == {"colour": "blue", "coats": 4, "share": 0.25, "glossy": False, "numbers": [1, 2]}
    assert found.update(coats=5) == {} and found.coats == 5


@pytest.mark.parametrize(
    "wrong", [{"colour": "green"}, {"coats": 0}, {"coats": 1.0}, {"share": 1}, {"glossy": 1}, {"tin": 3}]
)
def test_what_a_declaration_forbids_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PaintSettings(**wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PaintSettings().resolved(PaintSettings(), wrong)


def test_the_docstring_and_the_options_are_made_of_it():
    assert "coats (`int`, default `2`): How often it is painted." in PaintSettings.__doc__
    assert "numbers (`int` or `list[int]`, default `3`)" in PaintSettings.__doc__
    assert "Its colour: `red` is warm; `blue` is cold." in PaintSettings.__doc__
    options = setting_options(PaintSettings, "Paint.", helps={"glossy": "It shines."}, coats=7)
    parser = HfArgumentParser(options)
    help_text = " ".join(parser.format_help().split())
    assert "Its colour: red is warm; blue is cold. Default: the model's own, or red." in help_text
    assert "It shines." in help_text and "Whether it shines." not in help_text
    (none,) = parser.parse_args_into_dataclasses([])
    assert vars(none) == {"colour": None, "coats": 7, "share": None, "glossy": None, "numbers": None}
    given = ["--coats", "3", "--share", "0.5", "--glossy", "true", "--numbers", "1", "2"]
    (some,) = parser.parse_args_into_dataclasses(given)
    assert vars(some) == {"colour": None, "coats": 3, "share": 0.5, "glossy": True, "numbers": [1, 2]}
    (few,) = HfArgumentParser(setting_options(PaintSettings, "Paint.", ("share",))).parse_args_into_dataclasses([])
    assert vars(few) == {"share": None}


@pytest.mark.parametrize("config_class", [ChainGenerationConfig, JointGenerationConfig])
def test_every_setting_is_told_of(config_class):
    made = setting_options(config_class, "Settings.")
    parser = HfArgumentParser(made)
    helps = {action.dest: action.help for action in parser._actions}
    for own in config_class.declared():
        assert f"\n    {own.name} (`" in config_class.__doc__
        assert len(helps[own.name]) > 5
    assert config_class(**config_class.defaults).settings() == {
        name: value for name, value in config_class.defaults.items() if value is not None
    }


@pytest.mark.parametrize(
    ("config_class", "name", "table"),
    [(ChainGenerationConfig, "block_fill", FILLS), (ChainGenerationConfig, "block_layout", LAYOUTS),
     (ChainGenerationConfig, "order", ORDERS), (ChainGenerationConfig, "warm_start", WARM_STARTS),
     (ChainGenerationConfig, "kernel", KERNELS), (JointGenerationConfig, "method", METHODS)],
)  # fmt: skip
def test_the_default_of_a_table_is_its_first_entry(config_class, name, table):
    assert config_class.defaults[name] == next(iter(table))
