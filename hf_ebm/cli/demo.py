"""`hf-ebm demo`: a page in the browser that samples, compares kernels and scores texts. Stop it with Ctrl-C."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_ebm.cli.common import MaskedModelArguments, load_model, parse


@dataclass
class DemoArguments(MaskedModelArguments):
    """Which masked language model, and where the page is served."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0 for all networks."})
    port: int = field(default=7860, metadata={"help": "Port to listen on, 1 to 65535."})


def run(argv: list[str]) -> None:
    """Serves the page until interrupted. No public link is made, and nothing is sent anywhere."""
    from hf_ebm.demo import build_demo  # before a model is loaded: the extra may be missing

    (arguments,) = parse([DemoArguments], argv, "demo", __doc__)
    if not 1 <= arguments.port <= 65535:
        raise ValueError(f"port must be from 1 to 65535, got {arguments.port}")
    model, tokenizer = load_model(arguments)
    page = build_demo(model, tokenizer)
    page.launch(server_name=arguments.host, server_port=arguments.port, share=False, ssr_mode=False)
