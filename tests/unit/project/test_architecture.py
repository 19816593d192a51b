"""The code keeps the rules that neither a linter nor scripts/architecture knows."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import parse

pytestmark = pytest.mark.xdist_group("sources")
ROOT = Path(__file__).parents[3]
PACKAGES = ["api_schemas", "rollout_client", "sandboxes", "rollout_service"]


def modules(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path.relative_to(ROOT), parse(path)


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_only_tokens_knows_the_renderers_library():
    users = {
        path.parts[:2]
        for path, tree in modules("rollout_service")
        if any(name.split(".")[0] == "renderers" for name in imported(tree))
    }
    assert users == {("rollout_service", "tokens")}


def test_providers_of_sandboxes_do_not_import_each_other():
    for path, tree in modules("sandboxes"):
        if path.parts[1] != "providers":
            continue
        home = "." + ".".join(path.with_suffix("").parts[2:3])
        used = {name for name in imported(tree) if name.startswith("sandboxes.providers.")}
        foreign = {name for name in used if not f"{name}.".startswith(f"sandboxes.providers{home}.")}
        assert foreign <= {"sandboxes.providers.base", "sandboxes.providers.sandbox"}, (
            f"{path} imports {foreign}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_no_task_escapes_a_task_group(package):
    banned = {"create_task", "ensure_future", "gather", "run_coroutine_threadsafe"}
    for path, tree in modules(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in banned:
                pytest.fail(f"{path}:{node.lineno} uses {node.attr}; start it in a task group")


def test_no_package_index_is_named():
    hosts = ("pypi" + ".org", "python" + "hosted", "deb.debian" + ".org", "npm" + "js")
    for path in [ROOT / "requirements.lock", ROOT / "pyproject.toml", *(ROOT / "scripts").iterdir()]:
        if path.is_file():
            assert not [host for host in hosts if host in path.read_text()], path


@pytest.mark.parametrize("package", ["sandboxes", "rollout_service"])
def test_the_page_on_architecture_names_every_module(package):
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [
        ROOT / package,
        *(ROOT / package / name for name in ("authoring", "base", "observability", "server")),
    ]
    files = {path.name.removesuffix(".py") for room in rooms if room.is_dir() for path in room.iterdir()}
    names = {name for name in files if name[0] not in "_."} - {"py.typed"}
    assert not {name for name in names if not re.search(rf"\b{re.escape(name)}\b", page)}
