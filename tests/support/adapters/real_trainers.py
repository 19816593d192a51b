"""Scripts that run with the packages of real trainers, against a service with the embedded engine."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.api.server import api_server

ROOT = Path(__file__).parents[3]
TRAINERS = ROOT / ".venv-trainers"
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SCRIPT_SECONDS = 280.0


def figures_of(
    script: str, folder: Path, *, environment: str = "", overlay: str | None = None, sandbox: str = "local"
) -> dict[str, Any]:
    """Run a script of this folder with the trainers' own Python, and return the figures on its last line.

    `environment` is that of a trainer with a Python of its own. `overlay` is a folder with packages that come before
    the others, since its trainer wants others.
    """
    paths = [ROOT, ROOT / "examples" / "adapters"]
    paths = paths if overlay is None else [TRAINERS / overlay, *paths]
    command = [TRAINERS / environment / "bin" / "python", Path(__file__).parent / script]
    with api_server(folder, "--model", "calc-base", engine="embedded", sandbox=sandbox) as server:
        done = subprocess.run(
            command,
            env=os.environ | QUIET | {"ROLLOUT_URL": server.url, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=SCRIPT_SECONDS,
        )
    assert done.returncode == 0, done.stderr[-4_000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
