"""The walks of the documentation are those of the code."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "explanation" / "walks.md"
LANDMARKS = [
    "rollout_service/http/protocol.py",
    "rollout_service/gateway/server/app.py",
    "rollout_service/gateway/dialects/openai_chat/requests.py",
    "rollout_service/gateway/capture/capture.py",
    "rollout_service/tokens/renderer.py",
    "rollout_service/engines/pool/dispatch.py",
    "rollout_service/engines/kinds/sglang/backend.py",
    "rollout_service/gateway/dialects/openai_chat/responses.py",
]


@pytest.mark.extended("rollout_service/")
@pytest.mark.timeout(120)
def test_a_call_at_the_gateway_passes_the_files_of_the_page(tmp_path):
    figures = tmp_path / "walk.json"
    subprocess.run([ROOT / "scripts" / "walk", "gateway", "--json", figures], check=True, capture_output=True)
    passed: list[str] = json.loads(figures.read_text())["gateway"]
    assert [file for file in passed if file in LANDMARKS] == LANDMARKS
    told = set(files_of(PAGE.read_text().partition("## A call of Chat Completions")[2].partition("\n## ")[0]))
    assert len(told ^ set(passed)) <= 10, (told - set(passed), set(passed) - told)


def test_every_file_of_the_page_exists():
    found = files_of(PAGE.read_text().partition("\n## ")[2])
    assert len(found) > 300
    assert not [file for file in found if not (ROOT / file).is_file()]


def files_of(text: str) -> list[str]:
    """Return the paths in walks, each without a package for those of the service."""
    paths = []
    walks = [part for part in text.split("\n\n") if "\u2192" in part]
    for group in "\u2192".join(walks).split("\u2192"):
        folder, names = re.fullmatch(r"\s*(?:`(.*?)`)?\s*([\w,\s]+)", group).groups()  # type: ignore[union-attr]
        package = "" if (folder or "").startswith(("api_schemas", "sandboxes")) else "rollout_service/"
        paths += [f"{package}{folder or ''}{name.strip()}.py" for name in names.split(",")]
    return paths
