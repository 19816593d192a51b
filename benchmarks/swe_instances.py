"""Make tasks in SWE-bench's form from releases of packages, and check their grading with honest and hostile patches.

    scripts/make-swe-instances FOLDER --only sqlparse-0.5.2 --check

Each release is the repair of the one before it: the older is the only commit of the repository, so its history has
nothing of the repair; the patch is what the newer changes outside of the tests, the test patch what it changes there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
from support.swe_patches import hostile_patches

from rollout_service.environments.swe.grading import Precheck, SweEvaluation, SweOutcome
from rollout_service.environments.swe.patches import separate_forbidden
from rollout_service.environments.swe.tasks import read_task
from sandboxes import ApptainerConfig, SandboxProvider, SandboxSpec, make_provider

TEST_COMMAND = "PYTHONPATH=src python3 -m pytest -rA -p no:cacheprovider"
SECONDS = 600.0
BASE = "swe-base"
DOCKERFILE = f"FROM {BASE}\nCOPY repo /testbed\nWORKDIR /testbed\n"
GIT = {
    "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "HOME": "/",
    "PATH": os.environ["PATH"],
}
IDENTITY = ("-c", "user.name=task", "-c", "user.email=task@localhost", "-c", "safe.directory=*")


@dataclass(frozen=True, slots=True)
class Repair:
    """Two releases of a package, the second of which repairs the first."""

    package: str
    old: str
    new: str
    source: str
    """The module at the top of which a hostile patch puts its code."""
    tests: str = "tests"

    @property
    def name(self) -> str:
        return f"{self.package}-{self.new}"


REPAIRS = (
    Repair("sqlparse", "0.5.1", "0.5.2", "sqlparse/__init__.py"),
    Repair("cachetools", "5.4.0", "5.5.0", "src/cachetools/__init__.py"),
    Repair("sqlparse", "0.5.0", "0.5.1", "sqlparse/__init__.py"),
    Repair("mistune", "3.0.2", "3.1.0", "src/mistune/__init__.py"),
    Repair("tabulate", "0.8.9", "0.8.10", "tabulate.py", "test"),
    Repair("more-itertools", "10.1.0", "10.2.0", "more_itertools/__init__.py"),
    Repair("more-itertools", "10.2.0", "10.3.0", "more_itertools/__init__.py"),
    Repair("more-itertools", "10.3.0", "10.4.0", "more_itertools/__init__.py"),
)


def git(repo: Path, *words: str) -> str:
    done = subprocess.run(["git", *IDENTITY, "-C", repo, *words], check=True, capture_output=True, env=GIT)
    return done.stdout.decode(errors="surrogateescape")


def download(package: str, version: str, folder: Path) -> Path:
    named = f"{package}=={version}"
    into = folder / named
    pip = [os.environ.get("SWE_PIP_PYTHON", sys.executable), "-m", "pip", "download", "--quiet"]
    options = ["--disable-pip-version-check", "--no-deps", "--no-binary", ":all:", "--dest", str(into)]
    subprocess.run([*pip, *options, named], check=True, stdout=sys.stderr)
    (into / "tree").mkdir()
    unpack = ["tar", "--extract", "--no-same-owner", "--file", str(next(into.glob("*.tar.gz")))]
    subprocess.run([*unpack, "--directory", str(into / "tree")], check=True)
    return next((into / "tree").iterdir())


def fill(repo: Path, release: Path) -> None:
    """Copy the package, its tests, and nothing that would install it."""
    for path in release.iterdir():
        if path.is_dir() and (path.name in ("src", "tests", "test") or (path / "__init__.py").exists()):
            shutil.copytree(path, repo / path.name, ignore=shutil.ignore_patterns("*.egg-info"))
        elif path.suffix == ".py" and path.name != "setup.py":
            shutil.copy(path, repo / path.name)


def make_repository(repair: Repair, repo: Path, scratch: Path) -> dict[str, object]:
    """Make the repository with the older release, and return an instance without its tests' names."""
    repo.mkdir(parents=True)
    git(repo, "init", "--quiet", "--initial-branch", "main")
    fill(repo, download(repair.package, repair.old, scratch))
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", f"{repair.package} {repair.old}")
    base = git(repo, "rev-parse", "HEAD").strip()
    for path in repo.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    fill(repo, download(repair.package, repair.new, scratch))
    git(repo, "add", "--all")
    patch = git(repo, "diff", "--cached", "--no-renames", "--", ".", f":(exclude){repair.tests}")
    test_patch = git(repo, "diff", "--cached", "--no-renames", "--", repair.tests)
    git(repo, "reset", "--quiet", "--hard", base)
    git(repo, "reflog", "expire", "--expire=now", "--all")
    git(repo, "gc", "--quiet", "--prune=now")  # adding the newer release has stored its files
    return {
        "instance_id": f"packages__{repair.name}",
        "repo": f"packages/{repair.package}",
        "version": repair.old,
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": f"Make {repair.package} {repair.old} behave as its release {repair.new} does.",
        "image": f"swe-{repair.name}",
        "test_cmd": TEST_COMMAND,
        "log_parser": "parse_log_pytest",
        "FAIL_TO_PASS": ["to be found out"],
        "PASS_TO_PASS": [],
    }


def build(image: str, context: Path) -> None:
    (context / "Dockerfile").write_text(DOCKERFILE)
    command = ["rollout-service", "image", "build", str(context / "Dockerfile"), "--name", image]
    subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:]], check=True, stdout=sys.stderr)


async def grade(
    provider: SandboxProvider, instance: dict, patch: bytes, precheck: Precheck = Precheck.NOTHING
) -> SweOutcome:
    task = read_task(instance)
    async with await provider.start(SandboxSpec(image=task.image, network="none", memory_bytes=2 << 30)) as sandbox:
        kept, _ = separate_forbidden(patch, task.tests, task.gold)
        return await SweEvaluation(task, sandbox, SECONDS).judge(kept, precheck)


async def read(provider: SandboxProvider, instance: dict, path: str) -> str:
    async with await provider.start(SandboxSpec(image=instance["image"])) as sandbox:
        return (await sandbox.read_file(f"/testbed/{path}")).decode()


async def find_tests(provider: SandboxProvider, instance: dict) -> None:
    """Fill in which tests the repair makes pass, and which passed before: each has to pass twice."""
    before = await grade(provider, instance, b"", Precheck.CANARY)
    passed = None
    for _ in range(2):
        after = await grade(provider, instance, instance["patch"].encode(errors="surrogateescape"))
        found = {test for test, status in after.verdict.statuses.items() if status == "PASSED"}
        passed = found if passed is None else passed & found
    new = sorted(test for test in passed if before.verdict.statuses.get(test) != "PASSED")
    instance["FAIL_TO_PASS"], instance["PASS_TO_PASS"] = new, sorted(passed - set(new))


async def make(repairs: list[Repair]) -> list[dict]:
    instances = []
    with tempfile.TemporaryDirectory(prefix="swe-") as scratch, tempfile.TemporaryDirectory() as state:
        provider = make_provider(ApptainerConfig(), Path(state))
        try:
            for repair in repairs:
                start = time.perf_counter()
                context = Path(scratch) / repair.name
                instance = make_repository(repair, context / "repo", Path(scratch) / "releases")
                build(instance["image"], context)
                await find_tests(provider, instance)
                instances.append(instance)
                counts = f"{len(instance['FAIL_TO_PASS'])} to repair, {len(instance['PASS_TO_PASS'])} to keep"
                print(f"{repair.name:24} {counts}, {time.perf_counter() - start:.1f} s", flush=True)
                # A kept release of two would mix their folders.
                shutil.rmtree(Path(scratch) / "releases")
        finally:
            await provider.close()
    return instances


def write(folder: Path, instances: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(instance) for instance in instances]
    (folder / "instances.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "environment.toml").write_text(
        'kind = "swe"\nname = "swe-packages"\n\n[sandbox]\nmemory = "2G"\n\n[dataset]\npath = "instances.jsonl"\n'
    )


async def check(instances: list[dict]) -> int:
    """Grade each instance's patches, and return the number of wrong rewards."""
    wrong = 0
    sources = {f"packages__{repair.name}": repair for repair in REPAIRS}
    with tempfile.TemporaryDirectory() as state:
        provider = make_provider(ApptainerConfig(), Path(state))
        try:
            for instance in instances:
                repair = sources[instance["instance_id"]]
                honest = {"gold": instance["patch"].encode(errors="surrogateescape"), "empty": b""}
                patches = honest | hostile_patches(
                    instance, repair.source, await read(provider, instance, repair.source)
                )
                for name, patch in patches.items():
                    precheck = Precheck.CANARY if name == "gold" else Precheck.NOTHING
                    outcome = await grade(provider, instance, patch, precheck)
                    right = outcome.score.reward == float(name == "gold")
                    wrong += not right
                    said = "" if right else "  WRONG"
                    print(
                        f"{repair.name:24} {name:36} {outcome.score.reward:g}{said}  {'; '.join(outcome.notes)[:120]}",
                        flush=True,
                    )
        finally:
            await provider.close()
    print(f"{len(instances)} instances, {wrong} wrong rewards")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", choices=[repair.name for repair in REPAIRS])
    parser.add_argument("--check", action="store_true", help="grade honest and hostile patches of each instance")
    options = parser.parse_args()
    wanted = [repair for repair in REPAIRS if not options.only or repair.name in options.only]
    instances = anyio.run(make, wanted)
    write(options.folder, instances)
    return 1 if options.check and anyio.run(check, instances) else 0


if __name__ == "__main__":
    sys.exit(main())
