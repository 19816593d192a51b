"""The persistent Python session: an IPython kernel inside the sandbox that runs one cell at a time.

A cell is done when the kernel has replied and all output has arrived. At its timeout the cell and the processes it
started get SIGINT; the output and the session's variables are kept.
"""

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import anyio

from sandboxes.contract import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, OnOutput, PythonResult, PythonSession
from sandboxes.errors import SandboxClosedError, SandboxError, SandboxStartError, SessionDiedError
from sandboxes.limits.freezer import Freezer
from sandboxes.limits.violations import LimitViolations
from sandboxes.runtime.control import ControlShell
from sandboxes.sessions.kernel import PROGRAM, Cell, Kernel, KernelPaths, make_connection_info
from sandboxes.sessions.serial_session import OutputFeed, SerialSession

PROGRAM_INSIDE = "kernel.py"
INTERRUPT_GRACE = 5.0


class KernelSession(SerialSession[Kernel], PythonSession):
    """Started at its first cell and again after it has died."""

    _death_message = "the Python kernel ended after its last cell"

    def __init__(
        self,
        control: ControlShell,
        paths: KernelPaths,
        *,
        python: str,
        cwd: str,
        env: Mapping[str, str],
        start_timeout: float,
        violations: LimitViolations,
        explain: Callable[[SessionDiedError], Awaitable[SandboxError]],
        freezer: Freezer,
    ) -> None:
        super().__init__(control, cwd=cwd, env=env, violations=violations, explain=explain, freezer=freezer)
        self._paths = paths
        self._argv = (python, "-Xfrozen_modules=on", f"{paths.files_inside}/{PROGRAM_INSIDE}")
        self._start_timeout = start_timeout
        self._has_run = False
        """Whether a kernel has run before; code inside may then keep the next one from starting."""
        self._running = False
        self._interrupting = anyio.Lock(fast_acquire=True)
        self.has_run_code = False
        """Whether any cell was run, so that the kernel differs from a new one."""

    async def _start(self) -> None:
        env = {**self._env, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        token = secrets.token_hex(4)
        inside = self._write_connection(token)
        try:
            child = await self._control.spawn("run", (*self._argv, inside), cwd=self._cwd, env=env)
            self._process = await self._wait_until_ready(Kernel(child, self._paths, token))
        finally:
            (self._paths.files / f"{token}.json").unlink(missing_ok=True)  # the sandbox may have been closed meanwhile

    async def _wait_until_ready(self, kernel: Kernel) -> Kernel:
        """Blame code inside if a kernel after the first one does not start."""
        try:
            await self._connect(kernel)
        except SandboxStartError as error:
            if not self._has_run:
                raise
            raise await self._explain(SessionDiedError(str(error))) from error
        self._has_run = True
        return kernel

    async def _connect(self, kernel: Kernel) -> None:
        try:
            with anyio.fail_after(self._start_timeout):
                await kernel.connect()
        except TimeoutError as error:
            raise SandboxStartError(
                f"the Python kernel was not ready after {self._start_timeout:.0f} s; {kernel.log_tail()}"
            ) from error
        finally:
            if not kernel.ready:
                kernel.discard()

    def _write_connection(self, token: str) -> str:
        """Write the program too; return the connection file's path inside.

        Raises:
            SandboxClosedError: The sandbox has been closed.
            SandboxStartError: The host has no space left.
        """
        name = f"{token}.json"
        info = json.dumps(make_connection_info(f"{self._paths.sockets_inside}/{token}"))
        for path, text in ((name, info), (PROGRAM_INSIDE, PROGRAM.read_text())):
            file = self._paths.files / path
            try:
                file.write_text(text)
                file.chmod(0o644)
            except OSError as error:
                if not self._control.alive:
                    raise SandboxClosedError("the sandbox has ended") from error
                raise SandboxStartError(f"cannot write the files of the Python kernel: {error}") from error
        return f"{self._paths.files_inside}/{name}"

    async def execute(
        self,
        code: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
    ) -> PythonResult:
        if timeout <= 0 or output_limit <= 0:
            raise ValueError("timeout and output_limit must be positive")
        with self._freezer:
            async with self._lock:
                await self.open()
                cell = Cell(output_limit, OutputFeed(on_output, output_limit))
                try:
                    self._running = self.has_run_code = True
                    return await self._execute(code, timeout, cell, rich=on_output is not None, env=dict(env or {}))
                except SessionDiedError as error:
                    self.discard()
                    error.output = cell.output.text()
                    raise await self._explain(error) from None
                except BaseException:
                    self.discard()
                    raise
                finally:
                    self._running = False

    async def _execute(self, code: str, timeout: float, cell: Cell, **asked: object) -> PythonResult:
        if (kernel := self._process) is None:
            raise SessionDiedError("the Python kernel ended before the cell ran")
        begun = time.monotonic()
        request = kernel.send_cell(code, **asked)
        with anyio.move_on_after(timeout) as scope:
            await kernel.collect(request, cell)
        if scope.cancelled_caught:
            await self._stop(kernel, request, cell)
        async with self._interrupting:  # an interrupt under way is still for this cell
            self._running = False
        timed_out, truncated = scope.cancelled_caught, cell.truncated or cell.output.truncated
        return PythonResult(
            output=cell.output.text(),
            result=cell.result,
            error=cell.error,
            timed_out=timed_out,
            truncated=truncated,
            seconds=time.monotonic() - begun,
            limit_violations=self._violations.drain_with_call(
                timeout if timed_out else None, cell.output.limit if truncated else None
            ),
        )

    async def interrupt(self) -> None:
        async with self._interrupting:
            if self._running and self._process is not None:
                await self._signal(self._process)

    async def _signal(self, kernel: Kernel) -> None:
        """Interrupt the cell; return once no later one can be hit."""
        await kernel.child.signal("INT")
        with anyio.move_on_after(INTERRUPT_GRACE), suppress(SandboxClosedError):
            await self._control.wait_until_done()

    async def _stop(self, kernel: Kernel, request: str, cell: Cell) -> None:
        await self._signal(kernel)
        with anyio.move_on_after(INTERRUPT_GRACE):
            await kernel.collect(request, cell)
            return
        raise SessionDiedError("the cell timed out, and only ending its kernel could stop it", timed_out=True)
