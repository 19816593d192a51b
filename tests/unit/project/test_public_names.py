"""The names for authors of environments and tools stay, are on one page, and suffice."""

import ast
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import rollout_service.engines as engines
import rollout_service.environments as environments
import rollout_service.testing as testing

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "public-names.md").read_text()
PUBLIC = re.compile(r"from rollout_service\.(engines|environments|testing|groups) import")
EXTENDS = re.compile(r"from rollout_service\.environments\.(builtin|bridges)\b")
"""Examples may extend an environment that is built in."""


def names_in(section: str) -> set[str]:
    text = PAGE.partition(f"## `{section}`\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_page_has_the_names_for_authors() -> None:
    assert names_in("rollout_service.environments") == set(environments._HOMES)
    assert names_in("rollout_service.engines") == set(engines._HOMES)
    assert names_in("rollout_service.testing") == set(testing.__all__)


@pytest.mark.parametrize("module", [environments, engines])
def test_type_checkers_find_each_name_where_it_is_loaded_from(module: ModuleType) -> None:
    tree = ast.parse(Path(module.__file__ or "").read_text())
    homes = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert homes == module._HOMES
    assert all(getattr(module, name) is getattr(import_module(homes[name]), name) for name in homes)


def sources() -> list[Path]:
    folders = [ROOT / "examples" / "environments", ROOT / "examples" / "plugins", ROOT / "docs"]
    templates = ROOT / "rollout_service" / "cli" / "env" / "templates"
    return [path for folder in [*folders, templates] for end in ("py", "md") for path in folder.rglob(f"*.{end}")]


def test_pages_and_examples_use_no_other_names_of_the_service() -> None:
    lines = [
        (path.name, line.strip())
        for path in sources()
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) rollout_service\b", line)
    ]
    assert lines
    assert not [line for line in lines if not PUBLIC.match(line[1]) and not EXTENDS.match(line[1])]
