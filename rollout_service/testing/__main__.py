"""Runs a scripted engine as a process: `python -m rollout_service.testing`."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from rollout_service.engines.shipped import policy_folder
from rollout_service.testing.script import Replies
from rollout_service.testing.serving import serve
from rollout_service.testing.sglang_engine import ScriptedEngine

_SHIPPED_POLICY = policy_folder("calc-tuned")
_GREETING = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hello"}}\n</tool_call><|im_end|>'


def main(
    latency: Annotated[float, typer.Option("--latency", "--delay", min=0, help="Seconds per turn.")] = 0.0,
    turn: Annotated[list[str] | None, typer.Option(help="A turn's text; may be repeated.")] = None,
    model: Annotated[Path, typer.Option(help="Folder with the tokenizer.")] = _SHIPPED_POLICY,
    incremental: Annotated[bool, typer.Option(help="Stream each token once, not all of them in every chunk.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.")] = 0,
    address: Annotated[Path | None, typer.Option(help="Write the URL to this file.")] = None,
    port_file: Annotated[Path | None, typer.Option(help="Write the port to this file.")] = None,
) -> None:
    """Answer every request from a script, by default with a call of the bash tool, in a given time.

    Example: python -m rollout_service.testing --latency 2 --port 30000
    """
    config = json.loads((model / "config.json").read_bytes())
    engine = ScriptedEngine(
        Replies.from_texts(turn or [_GREETING], model),
        latency=latency,
        vocab_size=config["vocab_size"],
        model_path=model.resolve(),
        incremental=incremental,
        host=host,
        port=port,
    )
    anyio.run(partial(serve, engine, address=address, port_file=port_file), backend_options={"use_uvloop": True})


if __name__ == "__main__":
    typer.run(main)
