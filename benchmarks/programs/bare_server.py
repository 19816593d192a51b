"""The least that a service of FastAPI on uvicorn does: it answers `/health`.

Run: python benchmarks/programs/bare_server.py URL_FILE
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI

app = FastAPI(openapi_url=None)


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


with socket.create_server(("127.0.0.1", 0)) as listener:
    Path(sys.argv[1]).write_text(f"http://127.0.0.1:{listener.getsockname()[1]}")
    config = uvicorn.Config(app, log_config=None, access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
