"""`hf-ebm demo`, which serves the page of `hf_ebm.demo`."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, field

from hf_ebm.cli.commands import MaskedModelArguments, command, load_model


@dataclass
class DemoArguments(MaskedModelArguments):
    """Which masked language model, and where the page is served."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0 for all networks."})
    port: int = field(default=7860, metadata={"help": "Port to listen on, 1 to 65535."})


@command(lambda: [DemoArguments])
def demo(arguments: DemoArguments) -> None:
    """`hf-ebm demo`: a page in the browser that samples, fills, scores texts and variants. Stop it with Ctrl-C."""
    if not 1 <= arguments.port <= 65535:
        raise ValueError(f"port must be from 1 to 65535, got {arguments.port}")
    _check_free(arguments.host, arguments.port)
    from hf_ebm.demo import build_demo  # before a model is loaded: the extra may be missing

    model, tokenizer = load_model(arguments)
    page = build_demo(model, tokenizer)
    page.launch(server_name=arguments.host, server_port=arguments.port, share=False, ssr_mode=False)


def _check_free(host: str, port: int) -> None:
    """Raises `ValueError` unless the page can be served there."""
    for name in {host, "127.0.0.1"}:  # gradio tries both
        try:
            socket.create_server((name, port), family=socket.AF_INET6 if ":" in name else socket.AF_INET).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"port {port} is in use; choose another with --port") from error
            raise ValueError(f"{name}:{port} cannot be listened on: {error}; see --host and --port") from error
