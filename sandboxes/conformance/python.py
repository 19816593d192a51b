"""The Python session: state, results, exceptions, timeouts, interrupts, output, death."""

import anyio

from sandboxes.conformance.expectations import ConformanceError, expect, expect_cut, expect_error, interrupted
from sandboxes.contract import BashSession, PythonSession, Sandbox, SandboxProvider, SessionOutput
from sandboxes.errors import SandboxStartError, SessionDiedError


async def python_cells(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Values, output and exceptions are separate; state persists; tracebacks have no terminal colors."""
    python = await sandbox.python()
    first = await python.execute("import sys\nprint('out'); print('err', file=sys.stderr)\nx = 41")
    expect(first.output == "out\nerr\n" and first.result is None and first.error is None, first)
    expect((await python.execute("x + 1")).result == "42", "no state")
    failed = await python.execute("print('before')\n1/0")
    expect(failed.error is not None and failed.output == "before\n", failed)
    if failed.error is not None:
        expect(failed.error.ename == "ZeroDivisionError" and "\x1b" not in failed.error.traceback, failed)
        expect("1/0" in failed.error.traceback, failed.error.traceback)


async def python_time_out(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A timeout interrupts the cell and keeps the output and the session's variables."""
    python = await sandbox.python()
    await python.execute("x = 'kept'")
    for code in ("print('part', flush=True)\nwhile True: pass", "print('part')\nimport time; time.sleep(100)"):
        result = await python.execute(code, timeout=2)
        expect(result.timed_out and result.output.startswith("part\n"), (code, result))
    expect((await python.execute("x")).result == "'kept'", "state lost")


async def python_output_limit(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Long output, results and exceptions are cut in the middle, and the session goes on."""
    python = await sandbox.python()
    printed = await python.execute("print('a' + 'x' * 9_000_000 + 'b')", output_limit=1000)
    expect(printed.truncated and len(printed.output) < 1200 and printed.output.endswith("b\n"), printed)
    value = await python.execute("'y' * 9_000_000", output_limit=1000)
    expect(value.truncated and value.result is not None and len(value.result) < 1200, value)
    failed = await python.execute("raise ValueError('z' * 9_000_000)", output_limit=1000)
    expect(failed.error is not None and len(failed.error.evalue) < 1200, failed)
    expect((await python.execute("1 + 1")).result == "2", "the session did not go on")


async def python_dies(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A kernel that ends is an error; the next cell runs in a new kernel."""
    python = await sandbox.python()
    await python.execute("x = 1")
    await expect_error(SessionDiedError, python.execute("import os\nos._exit(3)"))
    fresh = await python.execute("x")
    expect(fresh.error is not None and fresh.error.ename == "NameError", fresh)
    await python.restart()
    expect((await python.execute("2 + 2")).result == "4", "no fresh kernel")


async def python_flood(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Code that prints faster than it is read has to wait; the timeout stops it at once, and state is kept."""
    python = await sandbox.python()
    await python.execute("import os, subprocess\nfrom IPython.display import display\nkept = 1")
    floods = (
        "while True: print('y' * 1000)",
        "while True: print('y' * 10_000_000)",
        "while True: display('y' * 1000)",
        "while True: os.write(2, b'y' * 1000)",
        "subprocess.run(['yes'])",
    )
    for flood in floods:
        result = await python.execute(flood, timeout=1.0)
        expect(result.timed_out and result.truncated, result)
        expect(result.error is not None and result.error.ename == "KeyboardInterrupt", result)
    result = await python.execute("kept")
    expect(result.result == "1", result)


async def python_interrupt(sandbox: Sandbox, _: SandboxProvider) -> None:
    """`interrupt` raises KeyboardInterrupt in the cell, repeatedly and in the middle of output; the kernel survives."""
    python = await sandbox.python()
    await python.execute("import os, subprocess, time\nkept = 1\ndef ready(): open('running', 'w').close()")
    await python.interrupt()  # nothing runs: nothing happens
    cells = (
        "ready(); time.sleep(60)",
        "ready()\nwhile True: print('x' * 100)",
        "ready(); subprocess.run(['sleep', '60'])",
        "ready()\nwhile True: pass",
    )
    for cell in cells:
        result = await interrupted(sandbox, python, python.execute(cell, timeout=30, output_limit=1000))
        expect(result.error is not None and result.error.ename == "KeyboardInterrupt", result)
        expect(not result.timed_out, result)
    result = await python.execute("kept")
    expect(result.result == "1", result)


async def python_cancelled(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A cancelled call ends the cell; the next call finds a working session."""
    python = await sandbox.python()
    with anyio.move_on_after(0.5):
        await python.execute("import time; time.sleep(3); open('reached', 'w').close()")
    result = await python.execute("import os, time; time.sleep(3); os.path.exists('reached')", timeout=60)
    expect(result.result == "False", result)


async def python_characters(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Characters of several bytes are never cut, whatever the limit."""
    python = await sandbox.python()
    for limit in (1000, 1001, 1002, 1003):
        result = await python.execute("print('€' * 3000, end='')", output_limit=limit)
        expect_cut(result, limit)


RICH = """
import base64, sys
from IPython.display import display
class Rich:
    def _repr_html_(self): return "<b>1</b>"
    def _repr_png_(self): return b"picture"
    def _repr_json_(self): return {"a": [1]}
    def __repr__(self): return "plain"
class Large(Rich):
    def __init__(self, size): self.size = size
    def _repr_png_(self): return b"x" * self.size
"""


async def python_streams(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Output is passed on as it arrives: both streams apart, and values in their formats, each and all bounded."""
    python = await sandbox.python()
    await python.execute(RICH)
    seen: list[SessionOutput] = []
    code = "print('out', end='', flush=True); print('err', end='', file=sys.stderr, flush=True); display(Rich())"
    done = await python.execute(f"{code}; Rich()", on_output=seen.append)
    kinds = [(one.kind, one.formats["text/plain"]) for one in seen]
    expect(kinds == [("stdout", "out"), ("stderr", "err"), ("display", "plain"), ("result", "plain")], seen)
    formats = {"text/html": "<b>1</b>", "image/png": "cGljdHVyZQ==", "application/json": '{"a":[1]}'}
    expect(all({**one.formats, **formats} == one.formats for one in seen[2:]), seen)
    expect((done.output, done.result) == ("outerrplain\n", "plain"), done)
    for size, fits in ((2_500_000, True), (2_700_000, False)):
        await python.execute(f"Large({size})", output_limit=4_000_000, on_output=seen.append)
        expect(fits == ("image/png" in seen[-1].formats), len(str(seen[-1])))
        expect(fits != ("left out" in seen[-1].formats["text/plain"]), seen[-1].formats["text/plain"])
    del seen[:]
    await python.execute("for _ in range(9): print('x' * 300, flush=True)", output_limit=1000, on_output=seen.append)
    expect(sum(len(one.formats["text/plain"]) for one in seen) < 1100 and "left out" in str(seen[-1]), seen)
    expect((await python.execute("Large(1)")).result == "plain", "formats came unasked")


async def python_early_output(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Output of a cell arrives while the cell runs."""
    python, printed = await sandbox.python(), anyio.Event()
    code = "import os, time\nprint(1, flush=True)\nwhile not os.path.exists('on'): time.sleep(0.01)"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: python.execute(code, timeout=30, on_output=lambda _: printed.set()))
        with anyio.fail_after(20):
            await printed.wait()
        await sandbox.write_file("on", "")


async def python_variables(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Variables of a cell are gone after it, and those it had before are back; others that it sets stay."""
    python = await sandbox.python()
    await python.execute("import os\nos.environ['OLD'] = 'before'")
    env, show = {"OLD": "now", "NEW": "x y"}, "[os.environ.get(name) for name in ('OLD', 'NEW', 'SET')]"
    during = await python.execute(f"os.environ['SET'] = 'set'\n{show}", env=env)
    expect(during.result == "['now', 'x y', 'set']", during)
    await python.execute("1/0", env=env)
    after = await python.execute(show)
    expect(after.result == "['before', None, 'set']", after)


async def python_others(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Other sessions have a state and a folder of their own, and one that dies or is closed ends no other."""
    python, shell = await sandbox.python(), await sandbox.bash()
    await sandbox.exec(["mkdir", "one", "two"])
    one, two = await sandbox.open_session("python", cwd="one"), await sandbox.open_session("bash", cwd="two")
    if not (isinstance(one, PythonSession) and isinstance(two, BashSession)):
        raise ConformanceError(f"found {one!r} and {two!r}")
    for session, value in ((python, 1), (one, 2)):
        await session.execute(f"import os\nx = {value}")
    await shell.run("x=3")
    expect((await one.execute("x, os.path.basename(os.getcwd())")).result == "(2, 'one')", "not its own")
    expect((await two.run('echo "$x${PWD##*/}"')).output == "two\n", "not its own")
    await expect_error(SessionDiedError, one.execute("os._exit(1)"))
    expect((await one.execute("1 + 1")).result == "2", "the session did not go on")
    waiting: list[Exception] = []

    async def wait() -> None:
        try:
            await two.run("sleep 60")
        except SessionDiedError as error:
            waiting.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        for closed in (one, two, two):
            await closed.close()
    await expect_error(SessionDiedError, one.execute("1"))
    await expect_error(SessionDiedError, two.run("true"))
    expect(len(waiting) == 1 and sandbox.healthy, waiting)
    expect((await python.execute("x")).result == "1" and (await shell.run("echo $x")).output == "3\n", "ended too")
    await expect_error(SandboxStartError, sandbox.open_session("python", cwd="missing"))
