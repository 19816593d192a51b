"""The two distributions of the repository agree: one version, one license, and imports that are declared."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import rollout_client
import rollout_service
from rollout_client import _wire
from tests.support.sources import parse

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "packaging" / "client"
TRAINERS = {
    *(
        "areal",
        "datasets",
        "fastapi",
        "hydra",
        "nemo_gym",
        "openrlhf",
        "skyrl",
        "slime",
        "starlette",
        "swift",
    ),
    *("tinker", "tinker_cookbook", "torch", "transfer_queue", "transformers", "trl", "uvicorn", "verifiers"),
    *("verl", "vllm"),
}
"""The packages that adapters import only when a trainer calls them; NeMo Gym, ms-swift and vLLM bring web servers."""


APART = {
    "gem",
    "gymnasium",
    "harbor",
    "mcp",
    "nemo-gym",
    "reasoning-gym",
    "swebench",
    "textarena",
    "verifiers",
}
"""Packages that are installed apart: the libraries of bridges, and Harbor, which imports `sandboxes`."""


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def requirements(folder: Path) -> set[str]:
    found = project(folder)["project"]["dependencies"]
    return {name_of(line) for line in found}


def name_of(requirement: str) -> str:
    return plain(re.match(r"[\w.-]+", requirement)[0])


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_the_service_requires_the_client_of_its_own_version():
    assert f"rollout-client=={rollout_client.__version__}" in project(ROOT)["project"]["dependencies"]
    assert rollout_service.__version__ == rollout_client.__version__
    for folder in (ROOT, CLIENT):
        path = project(folder)["tool"]["hatch"]["version"]["path"]
        assert (folder / path).resolve() == ROOT / "rollout_client" / "__init__.py"


def test_both_have_the_same_license():
    assert (CLIENT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def imported(*packages: str) -> set[str]:
    """Return the distributions from which these packages import, anywhere in them."""
    found = set()
    for path in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    known = packages_distributions()
    others = found - {"api_schemas", "rollout_client", "rollout_service", "sandboxes"} - sys.stdlib_module_names
    return {plain(known.get(module, [module])[0]) for module in others}


@pytest.mark.slow
def test_the_client_requires_what_it_imports_and_nothing_else():
    names = imported("api_schemas", "rollout_client") - {plain(name) for name in TRAINERS}
    assert names == requirements(CLIENT) | {"numpy", "zstandard"}, "these come with the extra `arrays`"


@pytest.mark.slow
def test_the_service_requires_what_it_imports_or_what_that_requires():
    table = project(ROOT)["project"]
    listed = requirements(ROOT)
    extras = {name_of(line) for lines in table["optional-dependencies"].values() for line in lines}
    brought, lines = set(listed), list(listed)
    for name in lines:
        below = [name_of(line) for line in metadata.requires(name) or [] if "extra ==" not in line]
        lines += [one for one in below if one not in brought and is_installed(one)]
        brought |= set(below)
    names = imported("sandboxes", "rollout_service")
    assert names - brought - extras - APART == set()
    assert len(listed) <= 15
    assert listed - names == {"rollout-client", "uvloop"}, "uvicorn imports uvloop"


def test_importing_the_package_alone_imports_nothing_of_weight():
    code = "import sys, rollout_client; print(*{name.split('.')[0] for name in sys.modules})"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & (requirements(CLIENT) | {"api_schemas", "numpy", "zstandard"})


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
