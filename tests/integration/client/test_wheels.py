"""Both distributions work when they are built as for publication and installed away from the checkout."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.api.server import api_server
from tests.support.packages.wheels import (
    OLDEST,
    ROOT,
    Environment,
    build,
    make_environment,
    oldest_python,
    uv,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow(seconds=190)]

MOST_PACKAGES = 15
MOST_MEBIBYTES = 15.0
HEAVY = {"httpx", "pydantic", "numpy", "anyio"}
TURNS = """\
{"tool_calls": [{"name": "guess", "arguments": {"number": 50}}]}
{"tool_calls": [{"name": "hint", "arguments": {}}]}
{"tool_calls": [{"name": "guess", "arguments": {"number": 1}}]}
{"content": "It is 1."}
"""
IMPORT_ALL = """
import importlib, pkgutil
import api_schemas, rollout_client
for package in (api_schemas, rollout_client):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
"""


@dataclass(frozen=True, slots=True)
class Wheels:
    client: Path
    service: Path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Build each wheel from its source distribution, in an isolated environment."""
    folder = tmp_path_factory.mktemp("dist")
    return Wheels(build(ROOT / "packaging" / "client", folder / "client"), build(ROOT, folder / "service"))


@pytest.fixture(scope="module")
def trainer(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Install only the client, as a trainer does, on the oldest supported Python that this machine has."""
    return make_environment(tmp_path_factory.mktemp("trainer") / "venv", wheels.client, python=oldest_python())


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    with api_server(folder, "--model", "calc-tuned", engine="embedded") as server:
        yield server.url


def modules(*packages: str) -> set[str]:
    found = {path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py")}
    return {str(path) for path in found}


def test_each_wheel_has_its_own_packages(wheels):
    client, server = (set(zipfile.ZipFile(wheel).namelist()) for wheel in (wheels.client, wheels.service))
    assert {name for name in client if name.endswith(".py")} == modules("api_schemas", "rollout_client")
    assert {name for name in server if name.endswith(".py")} == modules("sandboxes", "rollout_service")
    for names, packages in (
        (client, ("api_schemas", "rollout_client")),
        (server, ("sandboxes", "rollout_service")),
    ):
        assert {f"{package}/py.typed" for package in packages} <= names
        assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert not [name for name in names if "__pycache__" in name]
    page = ROOT / "rollout_service" / "server" / "dashboard" / "static"
    assert {str(path.relative_to(ROOT)) for path in page.rglob("*") if path.is_file()} <= server


def test_both_say_who_they_are(wheels):
    for wheel, title in (wheels.client, "# rollout-client"), (wheels.service, "# "):
        with zipfile.ZipFile(wheel) as file:
            (name,) = (one for one in file.namelist() if one.endswith(".dist-info/METADATA"))
            head, _, description = file.read(name).decode().partition("\n\n")
        assert description.startswith(title)
        assert "License-Expression: Apache-2.0" in head
    assert wheels.client.name.split("-")[1] == wheels.service.name.split("-")[1]


def test_the_source_distribution_of_the_client_is_complete(wheels):
    (archive,) = wheels.client.parent.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[1] for name in file.getnames()}
    assert modules("api_schemas", "rollout_client") | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith(("rollout_service", "sandboxes", "tests"))]


def test_the_client_is_small(trainer):
    installed = trainer.installed()
    sizes = trainer.mebibytes()
    print(f"{len(installed)} packages, {sum(sizes.values()):.0f} MiB")  # noqa: T201 - for -s
    assert len(installed) <= MOST_PACKAGES, sorted(installed)
    assert sum(sizes.values()) <= MOST_MEBIBYTES, sorted(sizes.items(), key=lambda item: -item[1])[:8]


def test_arrays_need_numpy_and_say_so(trainer):
    code = "from rollout_client import BatchArrays; BatchArrays.from_bytes(b'')"
    with pytest.raises(AssertionError, match=r"pip install 'rollout-client\[arrays\]'"):
        trainer.run("python", "-c", code)


def test_every_module_of_the_client_imports(trainer):
    """The adapters' modules import too, without their trainers."""
    imported = trainer.run("python", "-c", IMPORT_ALL).split()
    expected = {name.removesuffix(".py").replace("/", ".") for name in modules("api_schemas", "rollout_client")}
    assert set(imported) == {name.removesuffix(".__init__") for name in expected} - {
        "api_schemas",
        "rollout_client",
    }


def test_the_client_is_typed_for_its_oldest_python():
    """mypy knows that version's standard library, even if that Python is not installed."""
    version = ".".join(map(str, OLDEST))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--python-version",
        version,
        "-p",
        "api_schemas",
        "-p",
        "rollout_client",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_package_imports_nothing_of_weight(trainer):
    code = "import sys, rollout_client; print(*sys.modules)"
    assert not HEAVY & set(trainer.run("python", "-c", code).split())
    code = "import sys; from rollout_client import RolloutClient, SyncRolloutClient; print(*sys.modules)"
    assert set(trainer.run("python", "-c", code).split()) & (HEAVY | {"api_schemas"}) == {"anyio"}


def test_the_hello_world_trainer_needs_the_client_alone(trainer, address):
    printed = trainer.run("python", ROOT / "examples" / "hello_trainer.py", address)
    assert len(re.findall(r"ids, \d+ to train on", printed)) == 32, printed


def test_the_example_of_the_readme_runs(trainer, address):
    text = (ROOT / "packaging" / "client" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    printed = trainer.run("python", "-c", code.replace("http://127.0.0.1:8080", address))
    assert re.fullmatch(r"([01]\.0 1\n){4}", printed), printed
    assert printed.count("1.0 1") >= 2, "one in fifty fails by chance"


def test_a_trainer_keeps_its_versions(wheels, tmp_path):
    """Resolve the client with transformers 4 and torch: no version changes."""
    before = uv("pip", "compile", "--no-header", "--no-annotate", "--quiet", "-", stdin="transformers<5\ntorch\n")
    pins = tmp_path / "pins.txt"
    pins.write_text(before)
    with_client = f"transformers<5\ntorch\nrollout-client @ {wheels.client.as_uri()}\n"
    options = ["--no-header", "--no-annotate", "--quiet", "--constraints", pins]
    after = uv("pip", "compile", *options, "-", stdin=with_client)
    assert set(before.splitlines()) <= set(after.splitlines())


@pytest.mark.trainers
def test_trl_keeps_its_versions(wheels):
    python = ROOT / ".venv-trainers" / "bin" / "python"
    planned = uv(
        "pip",
        "install",
        "--dry-run",
        "--reinstall-package",
        "rollout-client",
        "--python",
        python,
        wheels.client,
    )
    changed = {line.split()[1].split("==")[0] for line in planned.splitlines() if re.match(r" [-+~] ", line)}
    assert changed == {"rollout-client"}, planned


@pytest.fixture(scope="module")
def away(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Install both wheels away from the checkout; third-party packages come from the tests' environment."""
    installed = make_environment(tmp_path_factory.mktemp("away") / "venv", "--no-deps", wheels.client, wheels.service)
    (others,) = (Path(path) for path in sys.path if path.endswith("site-packages"))
    (installed.packages / "others.pth").write_text(f"{others}\n")
    return installed


@pytest.mark.apptainer
def test_the_demo_runs_away_from_the_checkout(away, tmp_path):
    packages = ("api_schemas", "rollout_client", "sandboxes", "rollout_service")
    code = f"import {', '.join(packages)}\nfor one in ({', '.join(packages)}): print(one.__file__)"
    assert all(Path(line).is_relative_to(away.folder) for line in away.run("python", "-c", code).split())
    figures = tmp_path / "figures.json"
    away.run("rollout-service", "demo", "--rollouts", "8", "--json", figures, timeout=300)
    assert json.loads(figures.read_text())["figures"]["failed"] == 0


def test_a_plug_in_runs_from_its_own_wheel(away, tmp_path):
    """The example's tools work on the episode: they keep its state, and ask another model."""
    plug_in = build(ROOT / "examples" / "plugins" / "guess_number", tmp_path / "dist")
    uv("pip", "install", "--python", away.python, "--no-deps", plug_in)
    assert "guess-number" in away.run("rollout-service", "env", "list")
    (script := tmp_path / "turns.jsonl").write_text(TURNS)
    (hints := tmp_path / "hints.jsonl").write_text('{"content": "It is the least."}\n')
    command = ["rollout-service", "env", "run", "guess-number", "--sandbox", "local", "--script", script]
    rollout = json.loads(away.run(*command, "--pool-script", f"hints={hints}", "--json"))
    said = [message["content"] for message in rollout["trajectory"]["messages"] if message["role"] == "tool"]
    assert said == ["It is smaller.", "It is the least.", "That is it."]
    assert (rollout["reward"], rollout["reward_parts"]["guesses_left"]) == (1.0, 5.0)
