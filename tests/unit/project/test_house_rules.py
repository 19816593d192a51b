"""scripts/architecture, which `scripts/test` runs, names each rule that a checkout breaks."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
FOR_TYPES = "if TYPE_CHECKING:\n    from rollout_service.cli import x\n"


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    """Load the script, whose name has no suffix."""
    loader = SourceFileLoader("architecture", str(ROOT / "scripts" / "architecture"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, loader.name, module)  # where dataclasses look for it
        loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("files", "broken"),
    [
        ({"sandboxes/a.py": "import rollout_service"}, "sandboxes/a.py imports rollout_service"),
        ({"api_schemas/a.py": "from sandboxes import b"}, "api_schemas/a.py imports sandboxes"),
        ({"sandboxes/a.py": FOR_TYPES}, "sandboxes/a.py imports rollout_service"),
        (
            {"rollout_service/base/errors.py": "def f():\n    from rollout_service.server.api import app"},
            "rollout_service/base/errors.py imports server.api, which is above it",
        ),
        (
            {"rollout_service/engines/a.py": "from rollout_service.engines.serving import b"},
            "rollout_service/engines/a.py imports engines.serving, which is above it",
        ),
        (
            {"rollout_service/server/__init__.py": "from rollout_service.base import errors"},
            "rollout_service/server/__init__.py imports base.errors, which is above it",
        ),
        ({"rollout_service/attic.py": ""}, "rollout_service/attic.py has no layer"),
        ({"rollout_service/attic/__init__.py": ""}, "rollout_service/attic/__init__.py has no layer"),
        ({"rollout_service/server/attic/a.py": ""}, "rollout_service/server/attic/a.py has no layer"),
        (
            {"sandboxes/a.py": "from sandboxes.b import y", "sandboxes/b/c.py": "import sandboxes.a"},
            "sandboxes.a and sandboxes.b import each other",
        ),
        (
            {
                "rollout_service/server/api/a.py": "import rollout_service.server.dashboard.b",
                "rollout_service/server/dashboard/b.py": "import rollout_service.server.api.a",
            },
            "rollout_service.server.api and rollout_service.server.dashboard import each other",
        ),
        (
            {f"rollout_service/room{number}/a.py": "" for number in range(25)},
            "rollout_service holds 25 folders and modules, over 24",
        ),
        (
            {"sandboxes/a.py": "import sandboxes.b", "sandboxes/b.py": "import sandboxes.a"},
            "import each other",
        ),
        ({"sandboxes/c/a.py": "", "sandboxes/c/b.py": ""}, "sandboxes/c holds 2 modules, under 3"),
        ({"sandboxes/working.py": ""}, "sandboxes/working.py: working says too little"),
        ({"sandboxes/a.py": "class _Roster: ..."}, "sandboxes/a.py: Roster says too little"),
        (
            {"api_schemas/a.py": "class Twin: ...", "sandboxes/b.py": "\nclass _Twin: ..."},
            "rollout-service has 2 classes Twin: api_schemas/a.py:1, sandboxes/b.py:2",
        ),
    ],
)
def test_a_broken_rule_is_named(architecture, capsys, tmp_path, files, broken):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert architecture.main(["--root", str(tmp_path)]) == 1
    assert broken in capsys.readouterr().err


def test_types_may_come_from_a_higher_layer(architecture, tmp_path):
    (tmp_path / "rollout_service" / "base").mkdir(parents=True)
    (tmp_path / "rollout_service" / "base" / "errors.py").write_text(FOR_TYPES)
    (tmp_path / "rollout_service" / "base" / "data.json").touch()
    assert architecture.main(["--root", str(tmp_path)]) == 0
