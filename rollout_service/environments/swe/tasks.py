"""One task of SWE-bench's family, whatever set its instance is from.

The sets differ in names of fields and images, in the reference repair, and in how tests are run. `read_task` knows
SWE-bench (also Verified, Lite and Multilingual), SWE-Gym, SWE-smith, SWE-rebench and R2E-Gym, and instances with a
`test_cmd` and a `log_parser`.

Guarantees: an instance that lacks fields that the evaluation needs is rejected with their paths; nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue

from api_schemas.errors import FieldError
from rollout_service.base import strict_json
from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.dataset_files import InstanceFields, read_instance
from rollout_service.environments.swe.patches import changed_paths, split_patch
from rollout_service.environments.swe.scripts import make_script
from sandboxes.errors import ImagePathError
from sandboxes.image_names import read_image_name

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_TEST_MODULE = re.compile(r"^tests?[_.]|[_.](tests?|spec)\.\w+$")
_IMAGES = ("image", "docker_image", "image_name")
_LINK_TESTS = "[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests"
"""R2E-Gym's images have the tests at the root; its script wants them in the repository."""
COMMIT = r"^[0-9a-f]{7,64}$"


class SweFamily(StrEnum):
    """Instances of a set share their conventions."""

    SWE_BENCH = "swe-bench"
    SWE_GYM = "swe-gym"
    SWE_SMITH = "swe-smith"
    SWE_REBENCH = "swe-rebench"
    R2E_GYM = "r2e-gym"


@dataclass(frozen=True, slots=True)
class SweTask:
    instance_id: str
    family: SweFamily
    repo: str
    version: str
    image: str
    """Named by the settings or the instance, or published by the set."""
    folder: str
    """The repository in the image."""
    gold: bytes
    """The reference repair, if there is one."""
    tests: frozenset[str]
    """Files that the evaluation puts in place itself."""
    script: str
    """A bash script that puts the tests in place and runs them."""
    eval_type: str
    log_parser: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    base_commit: str = ""
    """Before the repair; "" means the image's."""
    branch: str = ""
    """The branch or commit to start from where the image has others too; "" means the image's."""
    bug: bytes = b""
    """A patch for images without the bug and without its branch."""
    reverse_gold: bool = False
    """The repair undoes the patch."""
    hidden: tuple[str, ...] = ()
    """Paths that the agent must not see."""
    expected: Mapping[str, str] | None = None
    """By test, where all statuses are compared."""


def without_colors(text: str) -> str:
    return _COLORS.sub("", text)


def _from_json(value: Any) -> Any:
    """Decode JSON, which some sets write in a string."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        return strict_json.parse(value.encode())
    return [] if value == "" else value


def _text(value: Any) -> Any:
    return "" if value is None else value


Text = Annotated[str, BeforeValidator(_text)]
Tests = Annotated[tuple[str, ...], BeforeValidator(_from_json)]


class _Install(InstanceFields):
    test_cmd: str | list[str] = ""
    log_parser: Text = ""


class _SweInstance(InstanceFields):
    instance_id: str = Field("", max_length=256)
    repo: Text = ""
    repo_name: Text = ""
    version: Text = ""
    base_commit: Annotated[str, BeforeValidator(_text), Field(pattern=rf"{COMMIT}|^$")] = ""
    commit_hash: Text = ""
    problem_statement: str
    patch: Text = ""
    test_patch: Text = ""
    FAIL_TO_PASS: Tests = ()
    PASS_TO_PASS: Tests = ()
    image: Text = ""
    docker_image: Text = ""
    image_name: Text = ""
    eval_script: Text = ""
    test_cmd: Text = ""
    log_parser: Text = ""
    eval_type: str = "pass_and_fail"
    install_config: Annotated[_Install | None, BeforeValidator(_from_json)] = None
    expected_output_json: Annotated[dict[str, str] | None, BeforeValidator(_from_json)] = None
    repo_folder: str = Field("/testbed", pattern=r"^/[\w./-]+$")
    family: SweFamily | None = None


def read_task(instance: dict[str, JsonValue], family: SweFamily | None = None, *, image: str = "") -> SweTask:
    """Read an instance of the set that its fields show, unless `family` names one; `image` replaces its own.

    Raises:
        InvalidFieldError: A field is wrong, or the evaluation lacks one.
    """
    read = read_instance(_SweInstance, instance)
    task = _READERS[family or read.family or _family_of(read)](read)
    return replace(task, image=image or _image_of(read, task.image))


def _family_of(read: _SweInstance) -> SweFamily:
    if read.expected_output_json is not None:
        return SweFamily.R2E_GYM
    if read.install_config is not None:
        return SweFamily.SWE_REBENCH
    if "swesmith" in read.image_name or read.repo.startswith("swesmith/"):
        return SweFamily.SWE_SMITH
    return SweFamily.SWE_BENCH


def _image_of(read: _SweInstance, published: str) -> str:
    """Return the image that the instance names, or its set publishes; it is never a path."""
    field = next((name for name in _IMAGES if getattr(read, name)), "")
    try:
        return read_image_name(getattr(read, field) if field else published)
    except ImagePathError as error:
        raise InvalidFieldError.at(f"instance.{field or 'instance_id'}", str(error), hint=error.hint) from error


def _swe_bench(read: _SweInstance, family: SweFamily = SweFamily.SWE_BENCH, publisher: str = "swebench") -> SweTask:
    separator = "_s_" if family is SweFamily.SWE_GYM else "_1776_"
    name = read.instance_id.replace("__", separator).lower()
    command, parser = read.test_cmd, read.log_parser
    if read.install_config is not None:
        words = read.install_config.test_cmd
        command = command or (words if isinstance(words, str) else " && ".join(words))
        parser = parser or read.install_config.log_parser
    _require(read, {"instance_id": read.instance_id, "FAIL_TO_PASS": read.FAIL_TO_PASS, "log_parser": parser})
    if not read.eval_script:
        _require(read, {"eval_script": command, "base_commit": read.base_commit, "test_patch": read.test_patch})
    script = read.eval_script or make_script(
        read.repo_folder,
        command,
        _runnable(read.test_patch),
        base=read.base_commit,
        test_patch=read.test_patch,
    )
    return SweTask(
        instance_id=read.instance_id,
        family=family,
        repo=read.repo,
        version=read.version,
        image=f"{publisher}/sweb.eval.x86_64.{name}:latest",
        folder=read.repo_folder,
        base_commit=read.base_commit,
        gold=read.patch.encode(errors="surrogateescape"),
        tests=changed_paths(read.test_patch.encode(errors="surrogateescape")),
        script=script,
        log_parser=parser,
        eval_type=read.eval_type,
        fail_to_pass=read.FAIL_TO_PASS,
        pass_to_pass=read.PASS_TO_PASS,
    )


def _swe_smith(read: _SweInstance) -> SweTask:
    """Read an instance whose patch is the bug. Its tests are those of the commit before its branch."""
    owner, _, rest = read.repo.removeprefix("swesmith/").partition("__")
    name, _, commit = rest.rpartition(".")
    named = read.FAIL_TO_PASS + read.PASS_TO_PASS
    files = frozenset(test.split("::")[0] for test in named if "::" in test)
    _require(read, {"instance_id": read.instance_id, "FAIL_TO_PASS": read.FAIL_TO_PASS, "patch": read.patch})
    command = read.test_cmd or "python -m pytest --disable-warnings --color=no --tb=no -rA"
    return SweTask(
        instance_id=read.instance_id,
        family=SweFamily.SWE_SMITH,
        repo=read.repo,
        version=read.version,
        image=f"swebench/swesmith.x86_64.{owner}_1776_{name}.{commit[:8]}".lower(),
        folder=read.repo_folder,
        branch=read.instance_id,
        bug=read.patch.encode(errors="surrogateescape"),
        gold=read.patch.encode(errors="surrogateescape"),
        reverse_gold=True,
        tests=files,
        script=read.eval_script or make_script(read.repo_folder, command, sorted(files), restore=True),
        log_parser=read.log_parser or "parse_log_pytest",
        eval_type=read.eval_type,
        fail_to_pass=read.FAIL_TO_PASS,
        pass_to_pass=read.PASS_TO_PASS,
    )


def _r2e_gym(read: _SweInstance) -> SweTask:
    """Read an instance whose image has the tests, which must all have their expected status."""
    _require(
        read,
        {"docker_image": read.docker_image or read.image, "expected_output_json": read.expected_output_json},
    )
    noted = (read.expected_output_json or {}).items()  # with the colors of the log that it was made from
    expected = {without_colors(name).split(" - ")[0]: status for name, status in noted}
    name = read.instance_id or f"{read.repo_name or read.repo}-{read.commit_hash}"
    return SweTask(
        instance_id=name,
        family=SweFamily.R2E_GYM,
        repo=read.repo or read.repo_name,
        version=read.version,
        image="",
        folder=read.repo_folder,
        gold=read.patch.encode(errors="surrogateescape"),
        tests=frozenset({"run_tests.sh", "r2e_tests"}),
        hidden=("/r2e_tests", f"{read.repo_folder}/r2e_tests", f"{read.repo_folder}/run_tests.sh"),
        script=read.eval_script
        or make_script(read.repo_folder, read.test_cmd or "bash run_tests.sh", [], before=_LINK_TESTS),
        eval_type=read.eval_type,
        expected=expected,
    )


_READERS: Mapping[SweFamily, Callable[[_SweInstance], SweTask]] = {
    SweFamily.SWE_BENCH: _swe_bench,
    SweFamily.SWE_GYM: partial(_swe_bench, family=SweFamily.SWE_GYM, publisher="xingyaoww"),
    SweFamily.SWE_SMITH: _swe_smith,
    SweFamily.SWE_REBENCH: partial(_swe_bench, family=SweFamily.SWE_REBENCH, publisher="swerebench"),
    SweFamily.R2E_GYM: _r2e_gym,
}

_WHY = {
    "eval_script": "is missing, and so is `test_cmd`: nothing says how the tests are run",
    "log_parser": "is missing: it names the parser of swebench that reads the tests' log",
}


def _require(read: _SweInstance, fields: Mapping[str, object]) -> None:
    missing = [
        FieldError(path=f"instance.{name}", message=_WHY.get(name, "is missing, and the evaluation needs it"))
        for name, value in fields.items()
        if not value
    ]
    if missing:
        raise InvalidFieldError(
            missing,
            hint=f"See docs/how-to/run-swe-tasks.md for what an instance must have ({read.instance_id}).",
        )


def _runnable(test_patch: str) -> list[str]:
    """Leave out the tests' data and helpers."""
    changes = split_patch(test_patch.encode(errors="surrogateescape"))
    paths = {path for change in changes if not change.deletes for path in change.paths}
    return sorted(path for path in paths if _TEST_MODULE.search(PurePosixPath(path).name))
