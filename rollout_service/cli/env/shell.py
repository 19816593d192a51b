"""Opens a shell in the sandbox of one instance, as the agent or the grader finds it.

The steps before the shell are those of a rollout. The sandbox is removed however the command ends: by the shell's end,
its death, a closed terminal, or a signal.
"""

from __future__ import annotations

import os
import signal
import termios
import tty
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from rollout_service.cli import common
from rollout_service.cli.common import CommandError
from rollout_service.cli.env.check import load_environment, read_dataset
from rollout_service.cli.env.engines import configured_sandboxes
from rollout_service.cli.env.run import parse_instance
from rollout_service.environments.contract import Environment, EvaluateIn
from rollout_service.environments.wrapped import Solving
from rollout_service.episodes import Episode, Score
from rollout_service.pipeline.trial import play
from rollout_service.settings import load_settings
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import BashSession, ExecResult, PythonSession, Sandbox
from sandboxes.sessions.terminal import SandboxTerminal, open_terminal
from sandboxes.task_groups import open_task_group

SHELL = ("bash", "--norc", "--noprofile", "-i")
"""The agent's own shell, except for its terminal."""
PROMPT = r"sandbox:\w\$ "


ShellStage = Literal["rollout", "evaluate"]


class _WithShell(Solving):
    """Another environment with a shell in place of its agent or of its grader."""

    def __init__(self, environment: Environment, stage: ShellStage, *, solve: bool) -> None:
        super().__init__(environment)
        self._stage = stage
        self._solve = solve
        self.exit_code = HUNG_UP
        self.episode_scope = anyio.CancelScope()
        """Cancelled when the shell has ended, so that nothing after it runs."""

    def for_instance(self, instance: dict[str, JsonValue]) -> Environment:  # noqa: ARG002 - it is already for one
        return self

    async def run(self, episode: Episode) -> StopReason:
        if self._solve:
            await self._environment.solve(episode)
        if self._stage == "rollout":
            await self._open(episode.require_sandbox(), "the agent's sandbox", {})
        return StopReason.FINISHED

    async def evaluate(self, episode: Episode) -> Score:
        """Run the grader up to its first program, and open the shell in its place."""
        sandbox = episode.require_sandbox()
        place = "the sandbox that is graded in"
        opened = GradersSandbox(sandbox, partial(self._open, sandbox, f"{place}, with the grader's files"))
        episode.sandbox = cast(Sandbox, opened)
        try:
            await super().evaluate(episode)
        except Exception as error:  # noqa: BLE001 a failing grader is a reason to look
            await self._open(sandbox, f"{place}, after the grader failed with {error}", {})
        await self._open(sandbox, f"{place}, after the grader: it runs nothing on files that it copies", {})
        raise AssertionError("the shell's end cancels the episode")

    async def _open(self, sandbox: Sandbox, place: str, env: Mapping[str, str]) -> None:
        common.err().print(f"a shell in {place}; the sandbox is removed when the shell ends", soft_wrap=True)
        self.exit_code = await run_shell(sandbox, env)
        self.episode_scope.cancel()
        await anyio.lowlevel.checkpoint()


class GradersSandbox:
    """A sandbox that calls `begin` with the variables of the first program that runs after files were copied in."""

    def __init__(self, sandbox: Sandbox, begin: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        self._sandbox = sandbox
        self._begin = begin
        self._has_files = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def import_path(self, parent: str, tar: AsyncIterable[bytes]) -> None:
        await self._sandbox.import_path(parent, tar)
        self._has_files = True

    async def write_file(self, path: str, data: bytes | str) -> None:
        await self._sandbox.write_file(path, data)
        self._has_files = True

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> ExecResult:
        await self._note(env or {})
        return await self._sandbox.exec(argv, env=env, **options)

    async def bash(self) -> BashSession:
        await self._note({})
        return await self._sandbox.bash()

    async def python(self) -> PythonSession:
        await self._note({})
        return await self._sandbox.python()

    async def _note(self, env: Mapping[str, str]) -> None:
        if self._has_files:
            await self._begin(env)


async def run_shell(sandbox: Sandbox, env: Mapping[str, str]) -> int:
    """Connect this process's terminal to a shell; return its exit code."""
    lines, columns = size_of_terminal()
    env = {**env, "TERM": os.environ.get("TERM", "xterm"), "PS1": PROMPT}
    async with open_terminal(sandbox, SHELL, lines=lines, columns=columns, env=env) as terminal:
        return await attach(terminal)


async def open_shell(name_or_path: str, index: int, instance: str | None, stage: ShellStage, *, solve: bool) -> int:
    require_terminal()
    environment = await anyio.to_thread.run_sync(load_environment, name_or_path)
    data = parse_instance(instance) if instance is not None else _instance_at(environment, index)
    if solve and not environment.has_solution:
        raise CommandError(f"{environment.spec.name} brings no solution", hint="Leave --solve out.")
    environment.check(data)
    shell = _WithShell(environment.for_instance(data), stage, solve=solve)
    _require_sandbox(shell, stage)
    async with open_task_group() as tasks:
        tasks.start_soon(_cancel_at_hang_up, tasks.cancel_scope, name="hang-up of the terminal")
        async with configured_sandboxes(load_settings()) as (sandboxes, _):
            with shell.episode_scope:
                await play(shell, data, ScriptedPolicy([]), sandboxes)
        tasks.cancel_scope.cancel()
    return shell.exit_code


def _instance_at(environment: Environment, index: int) -> dict[str, JsonValue]:
    dataset = read_dataset(environment)
    if index >= len(dataset):
        raise CommandError(
            f"{environment.spec.name} has no instance with index {index}; it has {len(dataset)}, from 0",
            hint="Pass another --index, or an --instance as JSON.",
        )
    return dataset[index]


def _require_sandbox(environment: Environment, stage: ShellStage) -> None:
    spec = environment.spec
    if spec.image is None:
        raise CommandError(f"{spec.name} uses no sandbox", hint="Give it an `image` if its agent needs one.")
    if stage == "evaluate" and spec.evaluate_in is EvaluateIn.NONE:
        raise CommandError(
            f"{spec.name} is scored without a sandbox", hint="Leave --stage out, for the agent's sandbox."
        )


async def _cancel_at_hang_up(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGHUP) as signals:
        async for _ in signals:
            scope.cancel()


# While connected, every key goes to the sandbox, Ctrl-C too, and this terminal obeys the escape sequences that come
# from there. Afterwards it is as it was before.

STDIN, STDOUT = 0, 1
READ_SIZE = 4096
HUNG_UP = 128 + signal.SIGHUP
"""The exit code if this process's terminal was closed."""
DEFAULT_SIZE = (24, 80)


def require_terminal() -> None:
    if not (os.isatty(STDIN) and os.isatty(STDOUT)):
        raise CommandError(
            "the standard input and output must be a terminal",
            hint="Run it in a terminal; over ssh, with `ssh -t`.",
        )


def size_of_terminal() -> tuple[int, int]:
    size = os.get_terminal_size(STDOUT)
    return (size.lines, size.columns) if size.lines and size.columns else DEFAULT_SIZE


async def attach(terminal: SandboxTerminal) -> int:
    """Connect both terminals until the sandbox's ends or this one is closed; return the command's exit code.

    Raises:
        SandboxClosedError: The sandbox has ended.
    """
    code = HUNG_UP
    with _raw():
        async with open_task_group() as tasks:
            tasks.start_soon(_pass_keys, terminal, tasks.cancel_scope, name="keys")
            tasks.start_soon(_pass_sizes, terminal, name="sizes of the window")
            if await _show(terminal):
                code = await terminal.wait()
            tasks.cancel_scope.cancel()
    return code


@contextmanager
def _raw() -> Iterator[None]:
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN, termios.TCSADRAIN)
    try:
        yield
    finally:
        with suppress(termios.error):  # it may have been closed
            termios.tcsetattr(STDIN, termios.TCSADRAIN, before)


async def _pass_keys(terminal: SandboxTerminal, ending: anyio.CancelScope) -> None:
    """Pass keys on; end the connection if the terminal is closed."""
    with suppress(OSError):
        while True:
            await anyio.wait_readable(STDIN)
            keys = os.read(STDIN, READ_SIZE)
            if not keys:
                break
            if not await terminal.type(keys):
                return
    ending.cancel()


async def _pass_sizes(terminal: SandboxTerminal) -> None:
    with anyio.open_signal_receiver(signal.SIGWINCH) as changes:
        async for _ in changes:
            await terminal.resize(*size_of_terminal())


async def _show(terminal: SandboxTerminal) -> bool:
    """Return False if this terminal was closed before the output ended."""
    while shown := await terminal.receive():
        try:
            while shown:
                await anyio.wait_writable(STDOUT)
                shown = shown[os.write(STDOUT, shown[:READ_SIZE]) :]
        except OSError:
            return False
    return True
