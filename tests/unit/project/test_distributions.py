"""The two distributions of the repository agree: one version, one license, and imports that are declared."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import rollout_client
import rollout_service

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "packaging" / "client"
TRAINERS = {"areal", "nemo_gym", "openrlhf", "skyrl", "slime", "torch", "verl"}
"""The packages that adapters import only when a trainer calls them."""

FORMER = {
    "client": "client",
    "client_errors": "errors",
    "client_export": "run_export",
    "client_runs": "runs",
    "client_sync": "sync",
    "batch_arrays": "arrays",
    "adapters.orders": "adapters.submit",
    **{
        f"adapters.{name}": f"adapters.{name}"
        for name in ["areal", "nemo_gym", "openrlhf", "samples", "skyrl", "slime", "trl", "verl", "weights"]
    },
}


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


def test_the_client_requires_what_it_imports_and_nothing_else():
    imported = set()
    for package in ("api_schemas", "rollout_client"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
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


def test_the_package_gives_its_names():
    for name in ("BatchArrays", "ClientError", "ClientRun", "LeasedBatch", "RolloutClient", "RunExport"):
        assert getattr(rollout_client, name).__module__.startswith("rollout_client.")
    assert not hasattr(rollout_client, "RoloutClient")


def test_former_paths_give_the_same_objects():
    for old, new in FORMER.items():
        former = importlib.import_module(f"rollout_service.{old}")
        now = importlib.import_module(f"rollout_client.{new}")
        shown = getattr(now, "__all__", [name for name in vars(now) if not name.startswith("_")])
        assert all(getattr(former, name) is getattr(now, name) for name in shown), old
