"""A registry and its images, with as little of the OCI's specifications as pulling requires."""

import base64
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.web_server import Answer, Asked, web_server

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
JSON = "application/json"
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


@contextmanager
def registry(layout: Path, *, user: str = "", password: str = "") -> Iterator[str]:
    """Serve the layout's image as `team/tiny:1`, behind the password if there is one; yield HOST:PORT."""
    word = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    blobs = {f"sha256:{path.name}": path.read_bytes() for path in (layout / "blobs/sha256").iterdir()}
    contents = {f"/v2/team/tiny/blobs/{name}": (data,) for name, data in blobs.items()}
    contents |= {f"/v2/team/tiny/manifests/{name}": (blobs[digest], MANIFEST) for name in ("1", digest)}
    contents["/v2/"] = (b"{}",)

    def answer(asked: Asked) -> Answer:
        if password and asked.headers.get("Authorization") != word:
            demand = {"content-type": JSON, "www-authenticate": 'Basic realm="test"'}
            return 401, demand, b'{"errors": [{"code": "UNAUTHORIZED", "message": "log in"}]}'
        if (found := contents.get(asked.path)) is None:
            return (
                404,
                {"content-type": JSON},
                b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "none"}]}',
            )
        data, *media_type = found
        return 200, {"content-type": media_type[0] if media_type else JSON}, data

    with web_server(answer) as address:
        yield address
