"""`python -m rollout_service.engines.kinds.embedded --model DIR`: serve a model until told to stop."""

import os
from pathlib import Path
from typing import Annotated

import typer

_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main(
    model: Annotated[Path, typer.Option(help="Folder with a Qwen3 model, as transformers writes it.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.")] = 0,
    port_file: Annotated[Path | None, typer.Option(help="Write the port here once it is bound.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Requests in a batch.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=16, help="Tokens whose KV is held.")] = 131_072,
    weight_version: Annotated[str, typer.Option(help="What the weights are called at first.")] = "default",
    threads: Annotated[int, typer.Option(min=1, help="Threads of a matrix product.")] = 1,
    exit_with_parent: Annotated[bool, typer.Option(help="Stop when standard input closes.")] = False,
) -> None:
    """Serve a small model on the CPU with SGLang's HTTP protocol.

    Example: python -m rollout_service.engines.kinds.embedded --model FOLDER --port 30000
    """
    for variable in _BLAS_THREADS:  # read when numpy is imported, so before anything that does
        os.environ[variable] = str(threads)
    from rollout_service.engines.kinds.embedded.scheduler import EngineOptions
    from rollout_service.engines.kinds.embedded.server import ORDERS_BY_GET, create_app
    from rollout_service.engines.kinds.embedded.weights import ModelError
    from rollout_service.engines.local_servers.asgi import serve

    try:
        app = create_app(
            str(model.resolve()),
            EngineOptions(max_running=max_running, kv_tokens=kv_tokens),
            weight_version=weight_version,
        )
    except ModelError as error:
        raise SystemExit(f"{model} cannot be served: {error}") from error
    serve(
        app,
        host,
        port,
        unsafe_get_paths=ORDERS_BY_GET,
        port_file=port_file,
        exit_with_parent=exit_with_parent,
    )


if __name__ == "__main__":
    typer.run(main)
