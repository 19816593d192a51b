"""The sources keep the rules of layers, tasks and docstrings."""

import ast
import re
import subprocess
from collections.abc import Iterator
from itertools import chain, pairwise
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
        shared = {f"sandboxes.providers.{name}" for name in ("base", "layers", "sandbox")}
        assert foreign <= shared, f"{path} imports {foreign}"


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


INDENT = " " * 4
ENTRY = re.compile(r"[\w.]+(?:, [\w.]+)*: (?:[A-Z`$]|vLLM\b).*\.", re.DOTALL)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def attribute_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string that stands under an assignment."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for above, below in pairwise(body if isinstance(body, list) else []):
            match above, below:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                    yield below.lineno, text


def raises_entries(docstring: str) -> Iterator[str]:
    """Yield the entries of the `Raises:` block, each with the lines that continue it."""
    block = docstring.partition("\nRaises:\n")[2].partition("\n\n")[0]
    yield from re.split(rf"\n(?={INDENT}\S)", block) if block else ()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_begins_with_take_or_what(package):
    wrong = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in chain(docstrings(parse(path)), attribute_docstrings(parse(path)))
        if text.startswith(("Take ", "What "))
    ]
    assert not wrong


def test_each_entry_of_raises_is_a_name_and_a_sentence():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {name: (ROOT / name).read_text() for name in listed.stdout.splitlines()}
    wrong = [
        f"{name}:{line}: {entry.strip()}"
        for name, source in modules.items()
        if "Raises:" in source
        for line, text in docstrings(parse(ROOT / name))
        for entry in raises_entries(text)
        if not ENTRY.fullmatch(entry.removeprefix(INDENT))
    ]
    assert not wrong
