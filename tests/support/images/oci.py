"""A registry and its images, with as little of the OCI's specifications as pulling requires."""

import base64
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def make_layout(tree: Path, target: Path, env: dict[str, str], **settings: str) -> Path:
    """Make an OCI image layout of one layer with the files of a folder; `settings` are those of its configuration."""
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(tree, ".")
    layer = add(packed.getvalue(), LAYER)
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {
            "Env": [f"{name}={value}" for name, value in env.items()],
            "Labels": {"title": "tiny"},
            **settings,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": add(json.dumps(config).encode(), CONFIG),
        "layers": [layer],
    }
    entry = add(json.dumps(manifest).encode(), MANIFEST)
    (target / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return target


class _Answers(BaseHTTPRequestHandler):
    """Serves the server's contents by path to clients that send its `Authorization` header, if it has one."""

    def do_GET(self) -> None:
        server: Any = self.server
        if server.word and self.headers.get("Authorization") != server.word:
            self.answer(401, b'{"errors": [{"code": "UNAUTHORIZED", "message": "log in"}]}')
        elif (found := server.has.get(self.path)) is not None:
            self.answer(200, *found)
        else:
            self.answer(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "none"}]}')

    do_HEAD = do_GET  # noqa: N815  the name that http.server calls

    def answer(self, status: int, data: bytes, media_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(data)))
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="test"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Keep the log out of the tests' output."""


@contextmanager
def registry(layout: Path, *, user: str = "", password: str = "") -> Iterator[str]:
    """Serve the layout's image as `team/tiny:1`, behind the password if there is one; yield HOST:PORT."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    word = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    server.word = word if password else ""
    digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    blobs = {f"sha256:{path.name}": path.read_bytes() for path in (layout / "blobs/sha256").iterdir()}
    server.has = {f"/v2/team/tiny/blobs/{name}": (data,) for name, data in blobs.items()}
    server.has |= {f"/v2/team/tiny/manifests/{name}": (blobs[digest], MANIFEST) for name in ("1", digest)}
    server.has["/v2/"] = (b"{}",)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
