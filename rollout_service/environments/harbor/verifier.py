"""The verifier of a task: copies the tests in, runs `test.sh`, and reads the reward that it wrote.

Guarantees:
- No sandbox of the rollout has the tests before the agent has ended.
- The host reads the reward after every process of the verifier has ended.
- A program is looked for first in folders that the agent did not fill, and no Python module in its folder is imported
  by accident.
- Tests that did not run are a failure, whatever reward was written; so is a missing, an empty, or an infinite one.

Not covered: tests that run the agent's program in their own sandbox, as is Harbor's format, can be deceived by it.
"""

from __future__ import annotations

import math
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import anyio.to_thread
from pydantic import TypeAdapter, ValidationError

from api_schemas.base import MAX_FLOAT32
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.declarative.files import PackedFile, archive, exported_file
from rollout_service.environments.harbor.task_folder import TEST, TaskStep
from rollout_service.episodes import Score
from sandboxes import ExecResult, Sandbox
from sandboxes.errors import FileMissingError

# The failures of a verifier, which leave a rollout without a reward.


class HealthcheckFailedError(EnvironmentFailedError):
    code = "healthcheck_failed"


class TestsNeverRanError(EnvironmentFailedError):
    __test__ = False  # pytest collects classes by their names
    code = "tests_never_ran"


class VerifierTimeoutError(EnvironmentFailedError):
    code = "verifier_timeout"


class RewardMissingError(EnvironmentFailedError):
    code = "reward_missing"


class RewardEmptyError(EnvironmentFailedError):
    code = "reward_empty"


class RewardInvalidError(EnvironmentFailedError):
    code = "reward_invalid"


TESTS = "/tests"
LOGS = "/logs/verifier"
REPORT = "ctrf.json"
"""Terminal-Bench's tests write it, if they run."""
MAX_REWARD_BYTES = 64 * 1024
MAX_REPORT_BYTES = 16 * 1024 * 1024
PRINTED_CHARS = 2_000
NOT_RUN = {126: "a program cannot be executed", 127: "a program is missing"}
_NAMES_A_TEST = re.compile(rb'"tests"\s*:\s*\[\s*\{')
_NOT_FOUND = re.compile(
    rb"^/tests/test\.sh: line \d+: ([^\n]{1,256}): (command not found|No such file or directory)$", re.MULTILINE
)
_NO_COMMAND = b"command not found"
NAMES_AT_ONCE = 64
_IS_MISSING = """
for name; do [ -e "$name" ] || command -v -- "$name" >/dev/null || printf '%s\\n' "$name"; done
"""


@dataclass(frozen=True, slots=True)
class Verifier:
    step: TaskStep
    env: Mapping[str, str]
    untrusted: Sequence[str] = ()
    """Folders with the agent's work."""

    async def run(self, sandbox: Sandbox) -> tuple[Rewards, str]:
        """Return the rewards, and the end of the tests' output.

        Raises:
            EnvironmentFailedError: There is none; its type says why.
            SandboxError: The sandbox has ended.
        """
        tests = await anyio.to_thread.run_sync(self.step.tests)
        await self._place(sandbox, tests)
        env = {"PYTHONSAFEPATH": "1", "PYTHONPATH": TESTS} | await self._path(sandbox) | dict(self.env)
        done = await sandbox.exec(
            ["bash", "-c", f"cd -- {shlex.quote(sandbox.workdir)}; exec {TESTS}/{TEST}"],
            cwd="/",  # the agent may have made the working folder something else
            env=env,
            timeout=self.step.verifier.timeout_sec,
        )
        await sandbox.end_processes()
        missing = await self._missing(sandbox, done, tests, env)
        await self._require_run(sandbox, done, tests, missing)
        return await _read_rewards(sandbox, done, tests), _output(done)

    async def _place(self, sandbox: Sandbox, tests: Sequence[PackedFile]) -> None:
        """Leave nothing of the agent in the folders of tests and results."""
        places = shlex.join([TESTS, LOGS])
        await sandbox.exec(["bash", "-c", f"rm -rf -- {places}; mkdir -p -- {places} /logs/artifacts"], cwd="/")
        files = [PackedFile(one.path, one.data, one.executable or one.path == TEST) for one in tests]
        await sandbox.import_path(TESTS, archive(files))

    async def _path(self, sandbox: Sandbox) -> dict[str, str]:
        """Put the agent's folders behind the others."""
        if not self.untrusted:
            return {}
        found = await sandbox.exec(["bash", "-c", 'printf %s "$PATH"'], cwd="/")
        folders = [folder for folder in found.stdout.decode(errors="replace").split(":") if folder]
        return {"PATH": ":".join(sorted(folders, key=self._is_untrusted))}

    def _is_untrusted(self, folder: str) -> bool:
        return _is_below(folder, self.untrusted) or folder[0] != "/"

    async def _missing(
        self, sandbox: Sandbox, done: ExecResult, tests: Sequence[PackedFile], env: Mapping[str, str]
    ) -> list[str]:
        """Return the programs that `test.sh` did not find, which it names and which are not there.

        The agent's program may print such a line too.
        """
        script = next(one.data for one in tests if one.path == TEST).decode(errors="replace")
        found = [
            posixpath.join("" if why == _NO_COMMAND else sandbox.workdir, name.decode(errors="replace"))
            for name, why in _NOT_FOUND.findall(done.stderr + b"\n" + done.stdout)
        ]
        named = [name for name in dict.fromkeys(found) if name.rpartition("/")[2] in script][:NAMES_AT_ONCE]
        if not named:
            return []
        look = ["bash", "-c", _IS_MISSING, "look", *named]
        return (await sandbox.exec(look, cwd="/", env=env)).stdout.decode(errors="replace").splitlines()

    async def _require_run(
        self, sandbox: Sandbox, done: ExecResult, tests: Sequence[PackedFile], missing: Sequence[str]
    ) -> None:
        seconds = self.step.verifier.timeout_sec
        if done.timed_out:
            raise VerifierTimeoutError(
                f"the verifier did not end within {seconds:g} s; {_printed(done)}",
                hint="Raise `timeout_sec` in [verifier], or give the sandbox more of the machine.",
            )
        places = [*self.untrusted, sandbox.workdir]
        needed = [name for name in missing if not _is_below(name, places)]  # the others are the agent's to make
        if done.exit_code in NOT_RUN and (needed or not missing):
            raise TestsNeverRanError(f"the tests never ran: {NOT_RUN[done.exit_code]}; {_printed(done)}", hint=_BAKE)
        if needed:
            raise TestsNeverRanError(f"{TEST} did not find {needed[0]!r}; {_printed(done)}", hint=_BAKE)
        if any(one.path == TEST and REPORT.encode() in one.data for one in tests):
            await _require_report(sandbox, done)


def _is_below(path: str, places: Sequence[str]) -> bool:
    return any(f"{path}/".startswith(f"{place}/") for place in places)


async def _require_report(sandbox: Sandbox, done: ExecResult) -> None:
    """Search the report instead of parsing it, which can take a second and twenty times its size."""
    try:
        report = await exported_file(sandbox, f"{LOGS}/{REPORT}", MAX_REPORT_BYTES)
    except FileMissingError as error:
        raise TestsNeverRanError(f"the tests left no {REPORT}; {_printed(done)}", hint=_BAKE) from error
    if _NAMES_A_TEST.search(report) is None:
        raise TestsNeverRanError(f"{REPORT} names no test; {_printed(done)}", hint=_BAKE)


async def _read_rewards(sandbox: Sandbox, done: ExecResult, tests: Sequence[PackedFile]) -> Rewards:
    """Read `reward.json` before `reward.txt`, unless the tests name only the latter."""
    kinds = {"reward.json": parse_json, "reward.txt": parse_text}
    if not any(b"reward.json" in one.data for one in tests) and any(b"reward.txt" in one.data for one in tests):
        kinds = {"reward.txt": parse_text}
    for name, parse in kinds.items():
        try:
            data = await exported_file(sandbox, f"{LOGS}/{name}", MAX_REWARD_BYTES)
        except FileMissingError:
            continue
        return parse(data)
    raise RewardMissingError(
        f"the verifier wrote no {' and no '.join(kinds)}; {_printed(done)}",
        hint=f"{TEST} must write to {LOGS}. Run `rollout-service env check --run` to try its solution.",
    )


_BAKE = (
    "What the tests need must be in the image: sandboxes have no network unless the task has an allow list. "
    "Run `rollout-service env check --run` to try the task's solution."
)


def _printed(done: ExecResult) -> str:
    text = _output(done)
    return f"it printed: {text}" if text else "it printed nothing"


def _output(done: ExecResult) -> str:
    return (done.stdout + done.stderr).decode(errors="replace").strip()[-PRINTED_CHARS:]


# A reward that is missing, empty, or not a finite number is an error, never a zero.

REWARD = "reward"
"""The reward, where a verifier writes several numbers."""

Rewards = dict[str, float]

_FLAT = TypeAdapter(dict[str, float])


def parse_json(data: bytes) -> Rewards:
    """Read a `reward.json`, a flat object."""
    _require_content(data, "reward.json")
    try:
        rewards = _FLAT.validate_json(data, strict=True)
    except ValidationError as error:
        item = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, item["loc"])) or "the file"
        raise RewardInvalidError(f"reward.json: {place}: {item['msg']}", hint=_HINT) from error
    if not rewards:
        raise RewardEmptyError("reward.json has no number in it", hint=_HINT)
    for key, value in rewards.items():
        _require_finite(value, f"reward.json: {key}")
    return rewards


def parse_text(data: bytes) -> Rewards:
    """Read a `reward.txt`, which has the only reward."""
    text = _require_content(data, "reward.txt")
    try:
        value = float(text)
    except ValueError as error:
        raise RewardInvalidError(f"reward.txt: not a number: {text[:80]!r}", hint=_HINT) from error
    _require_finite(value, "reward.txt")
    return {REWARD: value}


def main_reward(rewards: Rewards) -> float:
    """Return the value of the key `reward`, or the mean of all where there is none."""
    if REWARD in rewards:
        return rewards[REWARD]
    return math.fsum(rewards.values()) / len(rewards)


def is_below(rewards: Rewards, least: float | Mapping[str, float] | None) -> bool:
    """Return whether a step's rewards are too small to go on; a missing key is too small."""
    if least is None:
        return False
    needed = least if isinstance(least, Mapping) else {REWARD: least}
    return any(rewards.get(key, -math.inf) < value for key, value in needed.items())


def combine(steps: Sequence[tuple[str, Rewards]], strategy: Literal["mean", "final"]) -> Score:
    """Score a task by its graded steps, at least one, with their names, if any.

    `mean` is that of each key over the steps, a missing key counting as 0; `final` is the last step's.
    """
    if strategy == "final":
        total = steps[-1][1]
    else:
        keys = {key for _, rewards in steps for key in rewards}
        total = {key: math.fsum(rewards.get(key, 0.0) for _, rewards in steps) / len(steps) for key in sorted(keys)}
    parts = dict(total)
    parts |= {f"{name}.{key}": value for name, rewards in steps if name for key, value in rewards.items()}
    return Score(main_reward(total), parts)


_HINT = "The verifier must write one number to reward.txt, or a flat object of numbers to reward.json."


def _require_content(data: bytes, name: str) -> str:
    text = data.decode(errors="replace").strip()
    if not text:
        raise RewardEmptyError(f"{name} is empty", hint=_HINT)
    return text


def _require_finite(value: float, where: str) -> None:
    if not abs(value) <= MAX_FLOAT32:
        raise RewardInvalidError(f"{where}: {value} is not a number of up to {MAX_FLOAT32:g}", hint=_HINT)
