"""Serves one file over HTTP with the service's own HTTP server: the least that any response of its size costs.

Run: python benchmarks/programs/static_file.py FILE --address WHERE-TO-WRITE-THE-URL
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route

from rollout_service.http.connections import ConnectionLimits, Connections, descriptor_limit
from rollout_service.http.protocol import RequestLimits
from rollout_service.http.server import Server
from rollout_service.runs.delivery import PIECE_BYTES
from rollout_service.settings import Settings


class LargeFile(FileResponse):
    """A file sent in chunks as large as a batch's; with starlette's own of 64 KiB it takes longer than a batch."""

    chunk_size = PIECE_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--address", type=Path, required=True)
    given = parser.parse_args()

    async def answer(_: Request) -> LargeFile:
        return LargeFile(given.file)

    http = Settings().http
    config = uvicorn.Config(Starlette(routes=[Route("/", answer)]), log_config=None, access_log=False, ws="none")
    limits = RequestLimits(
        max_head_bytes=http.max_head_bytes,
        head_seconds=http.head_seconds,
        body_seconds=http.body_seconds,
        write_seconds=http.write_seconds,
    )
    connections = Connections(ConnectionLimits.within(descriptor_limit(), http.max_connections))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        draft = given.address.with_suffix(".draft")
        draft.write_text(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        draft.replace(given.address)
        Server(config, listener, connections=connections, limits=limits, observe=lambda _: None).run()


if __name__ == "__main__":
    main()
