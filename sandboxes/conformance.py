"""The contract as runnable checks, for anyone who writes a provider: `python -m sandboxes.conformance PROVIDER`.

Each check is given a fresh sandbox and its provider, and raises `ConformanceError` where the contract is broken.
Those of `ISOLATION_CHECKS` are for providers that claim `isolates`.
"""

import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import typer
from anyio.abc import SocketAttribute
from pydantic import TypeAdapter
from rich.console import Console

from sandboxes.config import ProviderConfig, make_provider
from sandboxes.contract import Sandbox, SandboxProvider, SandboxSpec
from sandboxes.errors import (
    EditMatchError,
    FileMissingError,
    FileTooLargeError,
    SandboxClosedError,
    SandboxError,
    SessionDiedError,
)

Check = Callable[[Sandbox, SandboxProvider], Awaitable[None]]

CHECK_SECONDS = 120.0
GRACE = 12.0
"""How long after a time-out a call may still return."""


class ConformanceError(AssertionError):
    """A provider does not keep the contract; the message says in what."""


def expect(holds: bool, found: object) -> None:
    """Fail with what was found instead.

    Raises:
        ConformanceError: it does not hold.
    """
    if not holds:
        raise ConformanceError(f"found {found!r}")


async def expect_error(kind: type[SandboxError], call: Awaitable[object]) -> SandboxError:
    """Await a call that must fail in one way.

    Raises:
        ConformanceError: it does not fail.
    """
    try:
        found = await call
    except kind as error:
        return error
    raise ConformanceError(f"no {kind.__name__}, but {found!r}")


async def bash_keeps_state(sandbox: Sandbox, _: SandboxProvider) -> None:
    """The working folder, variables and functions last from command to command; so does the session itself."""
    bash = await sandbox.bash()
    await bash.run("mkdir -p sub && cd sub && X=5 && f() { echo f$X; }")
    result = await (await sandbox.bash()).run('f; basename "$PWD"')
    expect(result.output == "f5\nsub\n", result)


async def bash_exit_codes(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Exit codes are exact, those of syntax errors and signals too, and the session goes on."""
    bash = await sandbox.bash()
    for command, code in (("true", 0), ("(exit 7)", 7), ("false | true", 0), ("if", 2), ("nope-nope", 127)):
        result = await bash.run(command)
        expect(result.exit_code == code, (command, result))
    result = await bash.run("bash -c 'kill -9 $$'")
    expect(result.exit_code == 137, result)
    await bash.run("(exit 5)")
    expect((await bash.run('echo "$?"')).output == "5\n", "$? is not the last command's")
    result = await bash.run('set -u; echo "$UNSET_VARIABLE"; echo never')
    expect(result.exit_code != 0 and "never" not in result.output, result)


async def bash_any_text(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Commands are taken as they are: quotes, lines, here-documents, no history expansion; output as UTF-8."""
    bash = await sandbox.bash()
    result = await bash.run("cat <<'X'\n'\"$HOME\" !x\nX\nprintf 'é\\xff\\n'")
    expect(result.output == '\'"$HOME" !x\né\ufffd\n', result)
    result = await bash.run("cat; echo done")
    expect(result.output == "done\n", result)
    long = "x" * 300_000
    result = await bash.run(f"echo {long} | wc -c", timeout=30)
    expect(result.output.strip() == "300001", result)


async def bash_time_out(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A time-out keeps what was printed and the session with its state, whatever form the command has."""
    bash = await sandbox.bash()
    await bash.run("KEPT=yes")
    stubborn = "echo part; bash -c 'trap \"\" INT TERM; while :; do sleep 1; done'; echo after"
    for command in ("echo part; sleep 60; echo after", "echo part; while :; do :; done", stubborn):
        begun = time.monotonic()
        result = await bash.run(command, timeout=1)
        expect(result.timed_out and result.exit_code is None, (command, result))
        expect(result.output.startswith("part\n"), (command, result))
        expect(time.monotonic() - begun < 1 + GRACE, (command, time.monotonic() - begun))
    result = await bash.run("echo $KEPT")
    expect(result.output == "yes\n", result)


async def bash_background(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A process in the background that holds the output open delays nothing and lives on."""
    bash = await sandbox.bash()
    begun = time.monotonic()
    result = await bash.run("(sleep 300; echo late) & echo $! >pid; echo now")
    expect("now\n" in result.output and time.monotonic() - begun < GRACE, result)
    result = await bash.run('sleep 60; kill -0 "$(cat pid)"', timeout=1)
    expect(result.timed_out, result)
    result = await bash.run('kill -0 "$(cat pid)" && kill "$(cat pid)"')
    expect(result.exit_code == 0, result)


async def bash_output_limit(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Output over the limit is cut in the middle and says so; one endless line is no exception."""
    bash = await sandbox.bash()
    result = await bash.run(
        "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last", output_limit=1000
    )
    expect(result.truncated and result.exit_code == 0, result)
    expect(result.output.startswith("first\n") and result.output.endswith("last\n"), result)
    expect(len(result.output) < 1200 and "left out" in result.output, len(result.output))
    result = await bash.run("yes", timeout=1, output_limit=1000)
    expect(result.timed_out and result.truncated and len(result.output) < 1200, result)


async def bash_dies(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A shell that ends is an error with what was printed; the next command runs in a fresh one."""
    bash = await sandbox.bash()
    await bash.run("X=1; echo kept >file")
    error = await expect_error(SessionDiedError, bash.run("echo out; exit 3"))
    expect(isinstance(error, SessionDiedError) and error.output.startswith("out\n"), error)
    result = await bash.run('echo "${X-gone}"; cat file')
    expect(result.output == "gone\nkept\n", result)
    await expect_error(SessionDiedError, bash.run("kill -9 $$"))
    await bash.restart()
    expect((await bash.run("echo up")).output == "up\n", "no fresh shell")


async def bash_cancelled(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A cancelled call ends the command; the next one finds a session that works."""
    bash = await sandbox.bash()
    with anyio.move_on_after(0.5):
        await bash.run("sleep 100; touch reached")
    result = await bash.run("ls; echo ok")
    expect(result.output.endswith("ok\n") and "reached" not in result.output, result)


async def bash_one_at_a_time(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Calls at the same time are run one after the other, each with its own result."""
    bash = await sandbox.bash()
    found: dict[int, str] = {}

    async def run(number: int) -> None:
        found[number] = (await bash.run(f"echo {number}")).output

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(run, number)
    expect(found == {number: f"{number}\n" for number in range(20)}, found)


async def python_cells(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Values, prints and exceptions come apart; state lasts; tracebacks have no terminal colours."""
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
    """A time-out interrupts the cell, keeps what was printed, and the session's variables."""
    python = await sandbox.python()
    await python.execute("x = 'kept'")
    for code in (
        "print('part', flush=True)\nwhile True: pass",
        "print('part')\nimport time; time.sleep(100)",
    ):
        result = await python.execute(code, timeout=2)
        expect(result.timed_out and result.output.startswith("part\n"), (code, result))
    expect((await python.execute("x")).result == "'kept'", "state lost")


async def python_output_limit(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Long prints, results and exceptions are cut in the middle, and the session goes on."""
    python = await sandbox.python()
    printed = await python.execute("print('a' + 'x' * 9_000_000 + 'b')", output_limit=1000)
    expect(printed.truncated and len(printed.output) < 1200 and printed.output.endswith("b\n"), printed)
    value = await python.execute("'y' * 9_000_000", output_limit=1000)
    expect(value.truncated and value.result is not None and len(value.result) < 1200, value)
    failed = await python.execute("raise ValueError('z' * 9_000_000)", output_limit=1000)
    expect(failed.error is not None and len(failed.error.evalue) < 1200, failed)
    expect((await python.execute("1 + 1")).result == "2", "the session did not go on")


async def python_dies(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A kernel that ends is an error; the next cell runs in a fresh one."""
    python = await sandbox.python()
    await python.execute("x = 1")
    await expect_error(SessionDiedError, python.execute("import os\nos._exit(3)"))
    fresh = await python.execute("x")
    expect(fresh.error is not None and fresh.error.ename == "NameError", fresh)
    await python.restart()
    expect((await python.execute("2 + 2")).result == "4", "no fresh kernel")


async def python_interrupt(sandbox: Sandbox, _: SandboxProvider) -> None:
    """`interrupt` is a KeyboardInterrupt in the cell that runs."""
    python = await sandbox.python()
    async with anyio.create_task_group() as tasks:

        async def interrupt_soon() -> None:
            while (await sandbox.exec(["test", "-e", "running"])).exit_code != 0:
                pass
            await python.interrupt()

        tasks.start_soon(interrupt_soon)
        result = await python.execute("open('running', 'w').close()\nimport time; time.sleep(60)", timeout=30)
    expect(result.error is not None and result.error.ename == "KeyboardInterrupt", result)
    expect(not result.timed_out, result)


async def exec_programs(sandbox: Sandbox, _: SandboxProvider) -> None:
    """One-shot programs have their own streams, input, environment, folder and exact exit codes."""
    data = bytes(range(256)) * 4000
    result = await sandbox.exec(["cat"], stdin=data, output_limit=2 * len(data))
    expect(result.exit_code == 0 and result.stdout == data, result.exit_code)
    script = 'echo "$1" "$GIVEN"; pwd >&2; exit 3'
    result = await sandbox.exec(["bash", "-c", script, "-", "a 'b"], env={"GIVEN": "x y"}, cwd="/")
    expect((result.exit_code, result.stdout, result.stderr) == (3, b"a 'b x y\n", b"/\n"), result)
    expect((await sandbox.exec(["no-such-program"])).exit_code == 127, "no 127")
    expect((await sandbox.exec(["bash", "-c", "kill -9 $$"])).exit_code == 137, "no 137")
    result = await sandbox.exec(["bash", "-c", "echo part; sleep 60"], timeout=0.5)
    expect(result.timed_out and result.exit_code is None and result.stdout == b"part\n", result)
    result = await sandbox.exec(["head", "-c", "5000000", "/dev/zero"], output_limit=100)
    expect(result.truncated and len(result.stdout) < 300, result)


async def exec_apart(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Programs run beside a busy session and beside each other."""
    bash = await sandbox.bash()
    begun = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bash.run, "sleep 2")
        for _number in range(8):
            tasks.start_soon(sandbox.exec, ["sleep", "2"])
    expect(time.monotonic() - begun < 2 + GRACE, time.monotonic() - begun)


async def files_round_trip(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Bytes come back as they were written, at paths of any characters, and as sessions see them."""
    data = bytes(range(256)) * 2000
    name = "a dir/ü 'quoted' $name\n.bin"
    await sandbox.write_file(name, data)
    expect(await sandbox.read_file(name) == data, "other bytes")
    expect(await sandbox.read_file(f"{sandbox.workdir}/{name}") == data, "relative is not absolute")
    entries = await sandbox.list("a dir")
    expect(
        [(entry.name, entry.size) for entry in entries] == [("ü 'quoted' $name\n.bin", len(data))], entries
    )
    await expect_error(FileTooLargeError, sandbox.read_file(name, limit=1000))
    await expect_error(FileMissingError, sandbox.read_file("missing"))
    await expect_error(FileMissingError, sandbox.list("missing"))
    await expect_error(SandboxError, sandbox.read_file("a dir"))
    await expect_error(SandboxError, sandbox.read_file("/dev/zero"))


async def files_edit(sandbox: Sandbox, _: SandboxProvider) -> None:
    """An edit replaces a text that is there exactly once, or all of them when told so."""
    await sandbox.write_file("f.txt", "one two\ntwo\n")
    expect(await sandbox.edit_file("f.txt", "one", "1") == 1, "not once")
    await expect_error(EditMatchError, sandbox.edit_file("f.txt", "two", "2"))
    await expect_error(EditMatchError, sandbox.edit_file("f.txt", "three", "3"))
    expect(await sandbox.edit_file("f.txt", "two", "2", replace_all=True) == 2, "not twice")
    expect(await sandbox.read_file("f.txt") == b"1 2\n2\n", await sandbox.read_file("f.txt"))
    await sandbox.write_file("binary", b"\xff\xfe")
    await expect_error(SandboxError, sandbox.edit_file("binary", "a", "b"))


async def files_to_another(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A tree goes to a fresh sandbox as a stream, within a limit."""
    await (await sandbox.bash()).run("mkdir -p out/d && echo hi >out/d/f && ln -s d out/link")
    async with await provider.start(SandboxSpec()) as fresh:
        await fresh.import_path(fresh.workdir, sandbox.export_path("out"))
        expect(await fresh.read_file("out/d/f") == b"hi\n", "not copied")
        kinds = {entry.name: entry.kind for entry in await fresh.list("out")}
        expect(kinds == {"d": "directory", "link": "symlink"}, kinds)

    async def export(path: str, limit: int) -> None:
        async for _ in sandbox.export_path(path, limit=limit):
            pass

    await expect_error(FileTooLargeError, export("out", 1000))
    await expect_error(FileMissingError, export("missing", 1000))


async def processes_end(sandbox: Sandbox, _: SandboxProvider) -> None:
    """`end_processes` ends all of them, sessions too; files stay, and new sessions open."""
    bash = await sandbox.bash()
    await bash.run("X=1; for number in 1 2 3; do (sleep 2; touch survived) & done")
    await sandbox.end_processes()
    result = await bash.run('sleep 3; ls; echo "${X-gone}"')
    expect(result.output == "gone\n", result)


async def closes(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """`close` ends calls under way, may be called again and at once, and leaves the sandbox unusable."""
    bash = await sandbox.bash()
    failures: list[SandboxError] = []

    async def run() -> None:
        failures.append(await expect_error(SandboxError, bash.run("sleep 100")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await sandbox.exec(["true"])
        tasks.start_soon(sandbox.close)
        tasks.start_soon(sandbox.close)
    expect(len(failures) == 1, failures)
    await sandbox.close()
    await expect_error(SandboxClosedError, bash.run("true"))
    await expect_error(SandboxClosedError, sandbox.exec(["true"]))
    await expect_error(SandboxClosedError, sandbox.read_file("x"))
    await expect_error(SandboxClosedError, sandbox.bash())
    await expect_error(SandboxClosedError, sandbox.python())
    expect(sandbox.id not in {info.id for info in provider.live()}, provider.live())


async def hidden_host(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Neither the host's files, nor its processes, nor its environment are to be seen."""
    with tempfile.NamedTemporaryFile(prefix="rollout-secret-", dir="/tmp") as secret:
        result = await sandbox.exec(["cat", secret.name])
        expect(result.exit_code != 0, result)
    result = await sandbox.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'"])
    expect(Path(sys.executable).name.encode() not in result.stdout, result.stdout)
    result = await sandbox.exec(["env"])
    home = os.environ.get("HOME", "/nowhere").encode()
    expect(b"HOME=" + home not in result.stdout.split() or home == b"/root", result.stdout)


async def hidden_network(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Without a network there is no way out, not even to the host's loopback."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.listeners[0].extra(SocketAttribute.local_port)  # noqa: S610  no Django
        result = await sandbox.exec(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"], timeout=10)
        expect(result.exit_code not in {0, None}, result)
    result = await sandbox.exec(["bash", "-c", "cat /proc/net/dev | tail -n +3 | cut -d: -f1"])
    expect(set(result.stdout.split()) <= {b"lo"}, result)


async def hidden_neighbours(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """Sandboxes see neither each other's files nor processes, and cannot end them."""
    async with await provider.start(SandboxSpec()) as other:
        mine = "/tmp/mine"  # noqa: S108  inside
        await sandbox.write_file(mine, b"x")
        await (await sandbox.bash()).run("sleep 4242 &")
        result = await other.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        expect(b"4242" not in result.stdout, result)
        expect((await other.exec(["cat", mine])).exit_code != 0, "a neighbour's file")
        await other.exec(["bash", "-c", "kill -9 -1"])
        expect((await (await sandbox.bash()).run("jobs")).output.count("4242") == 1, "a neighbour ended it")


async def control_out_of_reach(sandbox: Sandbox, _: SandboxProvider) -> None:
    """What runs inside cannot end or look into what holds the sandbox together, and killing all else is survived."""
    bash = await sandbox.bash()
    await bash.run("kill -9 1; kill -STOP 1")
    result = await bash.run("ls /proc/1/fd; cat /proc/1/environ >/dev/null")
    expect(result.exit_code != 0, result)
    await expect_error(SessionDiedError, bash.run("kill -9 -1; kill -9 $$"))
    expect((await bash.run("echo up")).output == "up\n", "the sandbox did not survive")


async def no_rights(sandbox: Sandbox, _: SandboxProvider) -> None:
    """No capability, no way to gain one, and no writing to the kernel's settings."""
    result = await sandbox.exec(["grep", "-E", "^(CapEff|CapBnd|NoNewPrivs)", "/proc/self/status"])
    found = dict(line.split(b":\t") for line in result.stdout.splitlines())
    expect(int(found[b"CapEff"], 16) == 0 and found[b"NoNewPrivs"] == b"1", found)
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"):
        result = await sandbox.exec(["bash", "-c", 'exec 3>>"$1"', "-", path])
        expect(result.exit_code != 0, (path, result))


CHECKS: tuple[Check, ...] = (
    bash_keeps_state,
    bash_exit_codes,
    bash_any_text,
    bash_time_out,
    bash_background,
    bash_output_limit,
    bash_dies,
    bash_cancelled,
    bash_one_at_a_time,
    python_cells,
    python_time_out,
    python_output_limit,
    python_dies,
    python_interrupt,
    exec_programs,
    exec_apart,
    files_round_trip,
    files_edit,
    files_to_another,
    processes_end,
    closes,
)
ISOLATION_CHECKS: tuple[Check, ...] = (
    hidden_host,
    hidden_network,
    hidden_neighbours,
    control_out_of_reach,
    no_rights,
)


async def run_check(check: Check, provider: SandboxProvider, image: str | None = None) -> None:
    """Run one check in a sandbox of its own.

    Raises:
        ConformanceError: the contract is broken, or the check took longer than it may.
        SandboxError: an error that the contract does not allow there.
    """
    with anyio.move_on_after(CHECK_SECONDS) as scope:
        async with await provider.start(SandboxSpec(image=image, label="conformance")) as sandbox:
            await check(sandbox, provider)
    if scope.cancelled_caught:
        raise ConformanceError(f"not done within {CHECK_SECONDS:.0f} s")


async def _run_all(name: str, image: str | None, console: Console) -> int:
    config = TypeAdapter[ProviderConfig](ProviderConfig).validate_python({"provider": name})
    failures = 0
    with tempfile.TemporaryDirectory() as state:
        provider = make_provider(config, Path(state))
        for check in (*CHECKS, *(ISOLATION_CHECKS if provider.isolates else ())):
            try:
                await run_check(check, provider, image)
            except (ConformanceError, SandboxError) as error:
                failures += 1
                console.print(f"[red]fails[/] {check.__name__}: {error}", highlight=False)
            else:
                console.print(f"[green]holds[/] {check.__name__}: {check.__doc__}", highlight=False)
        await provider.close()
    return failures


def main(provider: str, image: str | None = None) -> None:
    """Check a provider: `python -m sandboxes.conformance apptainer --image base`."""
    raise typer.Exit(min(1, anyio.run(_run_all, provider, image, Console())))


if __name__ == "__main__":
    typer.run(main)
