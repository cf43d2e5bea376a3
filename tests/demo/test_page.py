"""The page and its command: what is refused before anything is served, and nothing public by default."""

import inspect

import gradio as gr
import pytest

from hf_ebm import EnergyModel
from hf_ebm.cli.main import main
from hf_ebm.demo import build_demo
from hf_ebm.demo.components import fields_of_kernel, shows_errors
from tests.conftest import tiny_mlm
from tests.models.tokenizers_for_tests import small_model, small_tokenizer


def test_the_page_has_its_tabs_and_sends_nothing():
    tokenizer = small_tokenizer("wordpiece")
    page = build_demo(small_model(tokenizer), tokenizer)
    assert isinstance(page, gr.Blocks) and not page.analytics_enabled
    labels = [block.label for block in page.blocks.values() if isinstance(block, gr.Tab)]
    assert labels == ["Sample", "Compare kernels", "Score and rerank"]


def test_models_that_the_page_cannot_show():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    model.config.mask_token_id = 7
    with pytest.raises(ValueError, match="its mask token has id 4, the model's is 7"):
        build_demo(model, tokenizer)
    with pytest.raises(ValueError, match="mask_token_id and special_token_ids are not set"):
        build_demo(EnergyModel(tiny_mlm()), tokenizer)
    model.mlm.config.is_encoder_decoder = True
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
        ("metropolis_hastings", [True, True, True]),
        ("gibbs", [True, False, True]),
        ("mask_predict", [False, False, False]),
    ],
)
def test_fields_without_effect_cannot_be_typed_into(kernel, usable):
    assert [update["interactive"] for update in fields_of_kernel(kernel)[1:]] == usable


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
