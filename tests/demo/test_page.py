"""The page and its command: what is refused before anything is served, and nothing public by default."""

import inspect
from types import SimpleNamespace

import gradio as gr
import pytest

from hf_ebm import EnergyModel
from hf_ebm.assets import load_embedded
from hf_ebm.cli.main import main
from hf_ebm.demo import TABS, build_demo
from hf_ebm.demo.components import shows_errors
from hf_ebm.demo.sampling import fields_of_kernel
from tests.conftest import tiny_mlm
from tests.models.tokenizers_for_tests import small_model, small_tokenizer


@pytest.fixture(scope="module")
def page():
    tokenizer = small_tokenizer("wordpiece")
    return build_demo(small_model(tokenizer), tokenizer)


def clicked(page, name, *values):
    """What a button's handler yields for the values of its fields; an error is one on the page."""
    event = next(event for event in page.fns.values() if event.api_name == name)
    own = [request] if "request" in inspect.signature(event.fn).parameters else []
    found = list(event.fn(*values, *own))
    assert len(values) == len(event.inputs) and all(len(one) == len(event.outputs) for one in found)
    return found


request = SimpleNamespace(session_hash="mine")
FIELDS = {
    "sample": ["the ___ sat", 0, "gibbs", 4, 2, 1, 1, 0],
    "fill": ["the ___ sat", "cat, dog", "any words", "together", 1],
    "score": ["the cat", "energy"],
    "compare": ["the ___ sat", 0, 2, 1, 1, 0],
}


def test_the_page_has_its_tabs_and_sends_nothing(page):
    assert isinstance(page, gr.Blocks) and not page.analytics_enabled
    labels = [block.label for block in page.blocks.values() if isinstance(block, gr.Tab)]
    assert labels == list(TABS) and len(TABS) == 5


@pytest.mark.parametrize("name", FIELDS)
def test_every_button_ends_with_something_shown(page, name):
    *_, last = clicked(page, name, *FIELDS[name])
    assert all(last) and (name != "sample" or ("4. ", None) in last[0])  # as many chains as were asked for


def test_substitutions_are_shown_as_a_heat_map():
    page = build_demo(*load_embedded())
    status, shown, rows = clicked(page, "score_variants", "light", "ab", "", "masked_marginals")[-1]
    assert status.startswith("10 variants scored · 5 masked rows") and shown.count("<td") == 10 and len(rows) == 8


@pytest.mark.parametrize(
    "name,values,message",
    [
        ("sample", ["the ___", 0, "gibbs", 9, 4, 1, 1, 0], "chains must be a whole number from 1 to 8, got 9"),
        ("fill", ["the cat", "", "any words", "together", 1], "text must have 1 to 4 blanks"),
        ("fill", ["the ___", "☃", "any words", "together", 1], "words: "),
        ("score_variants", ["a☃", "ab", "", "joint"], "no token for the letter"),
        ("score_variants", ["", "ab", "", "joint"], "reference must have"),
    ],
)
def test_refusals_are_messages_on_the_page(page, name, values, message):
    with pytest.raises(gr.Error, match=message):
        clicked(page, name, *values)


def test_models_that_the_page_cannot_show():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    model.config.mask_token_id = 7
    with pytest.raises(ValueError, match="its mask token has id 4, the model's is 7"):
        build_demo(model, tokenizer)
    with pytest.raises(ValueError, match="mask_token_id and special_token_ids are not set"):
        build_demo(EnergyModel(tiny_mlm()), tokenizer)
    model.mlm.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="model must be an object with the methods generate"):
        build_demo(model.mlm, tokenizer)
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        build_demo(model, tokenizer)


def test_mistakes_become_messages_without_markup():
    @shows_errors
    def function(text):
        raise ValueError(f"got {text}")

    @shows_errors
    def generator(text):
        yield 1
        raise ValueError(f"got {text}")

    assert inspect.isgeneratorfunction(generator) and not inspect.isgeneratorfunction(function)
    for call in (lambda: function("<b>"), lambda: list(generator("<b>"))):
        with pytest.raises(gr.Error) as caught:
            call()
        assert caught.value.message == "got &lt;b&gt;" and not caught.value.print_exception


@pytest.mark.parametrize(
    "kernel,usable",
    [
        ("metropolis_hastings", [True, True, True, True, True]),
        ("gibbs", [True, True, True, False, True]),
        ("mask_predict", [False, True, False, False, False]),
    ],
)
def test_fields_without_effect_cannot_be_typed_into(kernel, usable):
    assert [update["interactive"] for update in fields_of_kernel(kernel)] == usable


def test_the_command_serves_on_this_machine_and_shares_nothing(monkeypatch):
    launched = []
    monkeypatch.setattr(gr.Blocks, "launch", lambda self, **options: launched.append(options))
    main(["demo", "--port", "7861"])
    assert launched == [{"server_name": "127.0.0.1", "server_port": 7861, "share": False, "ssr_mode": False}]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--port", "70000"], "port must be from 1 to 65535, got 70000"),
        (["--model", "no-such-folder/x"], "cannot be loaded"),
        (["--energy", "free"], "energy must be one of 'raw', 'local', got 'free'"),
    ],
)
def test_the_command_refuses_in_a_line(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["demo", *arguments])
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
