"""Distributions hold and import what they should, and the names for authors stay and suffice."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import rollout_client
import rollout_service
import rollout_service.engines as engines
import rollout_service.environments as environments
import rollout_service.testing as testing
from rollout_client import _wire
from tests.support.sources import parse

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "packaging" / "client"
TRAINERS = {"areal", "fastapi", "nemo_gym", "openrlhf", "skyrl", "slime", "torch", "verl"}
"""The packages that adapters import only when a trainer calls them; NeMo Gym brings fastapi."""


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def requirements(folder: Path) -> set[str]:
    found = project(folder)["project"]["dependencies"]
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in found}


def test_the_service_requires_the_client_of_its_own_version():
    assert f"rollout-client=={rollout_client.__version__}" in project(ROOT)["project"]["dependencies"]
    assert rollout_service.__version__ == rollout_client.__version__
    for folder in (ROOT, CLIENT):
        path = project(folder)["tool"]["hatch"]["version"]["path"]
        assert (folder / path).resolve() == ROOT / "rollout_client" / "__init__.py"


def test_both_have_the_same_license():
    assert (CLIENT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_client_requires_what_it_imports_and_nothing_else():
    imported = set()
    for package in ("api_schemas", "rollout_client"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(parse(path)):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.split(".")[0])
    ours = {"api_schemas", "rollout_client"}
    others = imported - ours - TRAINERS - sys.stdlib_module_names
    known = packages_distributions()
    names = {known.get(module, [module])[0].lower().replace("_", "-") for module in others}
    assert names == requirements(CLIENT) | {"numpy"}, "numpy comes with the extra `arrays`"


def test_importing_the_package_alone_imports_nothing_of_weight():
    code = "import sys, rollout_client; print(*{name.split('.')[0] for name in sys.modules})"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & (requirements(CLIENT) | {"api_schemas", "numpy"})


def test_importing_a_client_loads_no_model_and_no_http():
    """An import loads only anyio, which costs little; the other requirements are loaded when they are first used."""
    code = (
        "import sys\n"
        "from rollout_client import ClientError, ClientRun, LeasedBatch, RolloutClient, SyncRolloutClient\n"
        "print(*{name.split('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.replace("_", "-") for name in done.stdout.split()}
    assert loaded & (requirements(CLIENT) | {"api-schemas", "numpy", "pydantic-core"}) == {"anyio"}


def test_every_wire_model_of_the_client_is_the_one_that_type_checkers_see():
    tree = ast.parse(Path(_wire.__file__).read_text())
    (condition,) = (node for node in tree.body if isinstance(node, ast.If))
    declared = {alias.name: line.module for line in condition.body for alias in line.names}
    assert declared == _wire._HOMES
    for name, module in declared.items():
        assert getattr(_wire, name) is getattr(importlib.import_module(module), name)
    assert not hasattr(_wire, "Rolout")


@pytest.mark.slow
def test_many_threads_may_use_wire_models_first():
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from threading import Barrier\n"
        "from rollout_client import _wire\n"
        "names = [name for name in _wire._HOMES if name[0].isupper()] * 2\n"
        "together = Barrier(len(names))\n"
        "def use(name):\n"
        "    together.wait()\n"
        "    return getattr(_wire, name)\n"
        "with ThreadPoolExecutor(len(names)) as pool:\n"
        "    found = list(pool.map(use, names))\n"
        "assert found == [getattr(_wire, name) for name in names]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_package_gives_its_names():
    for name in ("BatchArrays", "ClientError", "ClientRun", "LeasedBatch", "RolloutClient", "RunExport"):
        assert getattr(rollout_client, name).__module__.startswith("rollout_client.")
    assert not hasattr(rollout_client, "RoloutClient")


PAGE = (ROOT / "docs" / "reference" / "public-names.md").read_text()
PUBLIC = re.compile(r"from rollout_service\.(engines|environments|testing|groups) import")
EXTENDS = re.compile(r"from rollout_service\.environments\.(builtin|bridges)\b")
"""Examples may extend an environment that is built in."""


def names_in(section: str) -> set[str]:
    text = PAGE.partition(f"## `{section}`\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_page_has_the_names_for_authors():
    assert names_in("rollout_service.environments") == set(environments._HOMES)
    assert names_in("rollout_service.engines") == set(engines._HOMES)
    assert names_in("rollout_service.testing") == set(testing.__all__)


@pytest.mark.parametrize("module", [environments, engines])
def test_type_checkers_find_each_name_where_it_is_loaded_from(module):
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
    return [
        path for folder in [*folders, templates] for end in ("py", "md") for path in folder.rglob(f"*.{end}")
    ]


def test_pages_and_examples_use_no_other_names_of_the_service():
    lines = [
        (path.name, line.strip())
        for path in sources()
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) rollout_service\b", line)
    ]
    assert lines
    assert not [line for line in lines if not PUBLIC.match(line[1]) and not EXTENDS.match(line[1])]
