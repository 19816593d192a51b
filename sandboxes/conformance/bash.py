"""The bash session: state, exit codes, timeouts, interrupts, output, death."""

import time

import anyio

from sandboxes.conformance.expectations import GRACE, expect, expect_cut, expect_error, interrupted
from sandboxes.contract import Sandbox, SandboxProvider, SessionOutput
from sandboxes.errors import SessionDiedError


async def bash_keeps_state(sandbox: Sandbox, _: SandboxProvider) -> None:
    """The working folder, variables and functions persist between commands, as does the session itself."""
    bash = await sandbox.bash()
    await bash.run("mkdir -p sub && cd sub && X=5 && f() { echo f$X; }")
    result = await (await sandbox.bash()).run('f; basename "$PWD"')
    expect(result.output == "f5\nsub\n", result)


async def bash_exit_codes(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Exit codes are exact, including those of syntax errors and signals, and the session goes on."""
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


async def bash_ended_by_signals(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A program that a signal ends adds nothing to the output, and commands inherit only three descriptors."""
    bash = await sandbox.bash()
    for command in ("yes | head -n 1", "sh -c 'echo y; kill -9 $$'", "(echo y; kill -9 $BASHPID) | cat"):
        result = await bash.run(command)
        expect(result.output == "y\n", (command, result))
    result = await bash.run("ls /proc/self/fd")
    expect(result.output.split() == ["0", "1", "2", "3"], result)


async def bash_any_text(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Commands run as they are: quotes, several lines, here-documents, no history expansion. Output is UTF-8."""
    bash = await sandbox.bash()
    result = await bash.run("cat <<'X'\n'\"$HOME\" !x\nX\nprintf 'é\\xff\\n'")
    expect(result.output == '\'"$HOME" !x\né\ufffd\n', result)
    result = await bash.run("cat; echo done")
    expect(result.output == "done\n", result)
    long = "x" * 300_000
    result = await bash.run(f"echo {long} | wc -c", timeout=30)
    expect(result.output.strip() == "300001", result)


async def bash_time_out(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A timeout keeps the output and the session's state, whatever form the command has."""
    bash = await sandbox.bash()
    await bash.run("KEPT=yes")
    stubborn = "echo part; bash -c 'trap \"\" INT TERM; while :; do sleep 1; done'; echo after"
    for command in ("echo part; sleep 60; echo after", "echo part; while :; do :; done", "yes part", stubborn):
        begun = time.monotonic()
        result = await bash.run(command, timeout=1)
        expect(result.timed_out and result.exit_code is None, (command, result))
        expect(result.output.startswith("part\n"), (command, result))
        expect(time.monotonic() - begun < 1 + GRACE, (command, time.monotonic() - begun))
    result = await bash.run("echo $KEPT")
    expect(result.output == "yes\n", result)


async def bash_background(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A background process that keeps the output open delays nothing and lives on."""
    bash = await sandbox.bash()
    begun = time.monotonic()
    result = await bash.run("(sleep 300; echo late) & echo $! >pid; echo now")
    expect("now\n" in result.output and time.monotonic() - begun < GRACE, result)
    result = await bash.run('sleep 60; kill -0 "$(cat pid)"', timeout=1)
    expect(result.timed_out, result)
    result = await bash.run('kill -0 "$(cat pid)" && kill "$(cat pid)"')
    expect(result.exit_code == 0, result)


async def bash_output_limit(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Output over the limit is cut in the middle and says so, even if it is one endless line."""
    bash = await sandbox.bash()
    result = await bash.run("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last", output_limit=1000)
    expect(result.truncated and result.exit_code == 0, result)
    expect(result.output.startswith("first\n") and result.output.endswith("last\n"), result)
    expect(len(result.output) < 1200 and "left out" in result.output, len(result.output))
    result = await bash.run("yes", timeout=1, output_limit=1000)
    expect(result.timed_out and result.truncated and len(result.output) < 1200, result)


async def bash_dies(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A shell that ends is an error with the output so far; the next command runs in a new shell."""
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
    """A cancelled call ends the command; the next call finds a working session."""
    bash = await sandbox.bash()
    with anyio.move_on_after(0.5):
        await bash.run("sleep 100; touch reached")
    result = await bash.run("ls; echo ok")
    expect(result.output.endswith("ok\n") and "reached" not in result.output, result)


async def bash_one_at_a_time(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Concurrent calls run one after the other, each with its own result."""
    bash = await sandbox.bash()
    found: dict[int, str] = {}

    async def run(number: int) -> None:
        found[number] = (await bash.run(f"echo {number}")).output

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(run, number)
    expect(found == {number: f"{number}\n" for number in range(20)}, found)


async def bash_interrupt(sandbox: Sandbox, _: SandboxProvider) -> None:
    """`interrupt` ends the command and its children, repeatedly and in the middle of output; the shell survives."""
    bash = await sandbox.bash()
    await bash.run("KEPT=yes; sleep 300 & background=$!")
    await bash.interrupt()  # nothing runs: nothing happens
    commands = (
        "touch running; sleep 60; echo after",
        "touch running; yes",
        "touch running; bash -c 'bash -c \"sleep 60; touch survived\"; touch survived'; touch survived",
        "touch running; while :; do echo x; done",
        "(touch running; sleep 60) | cat",
    )
    for command in commands:
        result = await interrupted(sandbox, bash, bash.run(command, timeout=30, output_limit=1000))
        expect(result.exit_code is not None and not result.timed_out, result)
        expect("after" not in result.output and result.seconds < GRACE, result)
    result = await bash.run("ls; echo $KEPT; kill -0 $background && kill $background")
    expect(result.output == "yes\n" and result.exit_code == 0, result)


async def bash_interrupt_anywhere(sandbox: Sandbox, _: SandboxProvider) -> None:
    """An interrupt between two programs ends the command too, and does not affect the next one."""
    bash = await sandbox.bash()
    for _round in range(10):
        several = bash.run("touch running; env true; env true; env true; sleep 60", timeout=30)
        result = await interrupted(sandbox, bash, several)
        expect(not result.timed_out and result.seconds < GRACE, result)
        result = await bash.run("echo free; (exit 3)", timeout=GRACE)
        expect(result.output == "free\n" and result.exit_code == 3, result)
        result = await bash.run("echo $?")
        expect(result.output == "3\n", result)


async def bash_stops_loops(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A loop over short programs ends at its timeout and, in most cases, the shell survives: bash can lose signals."""
    bash = await sandbox.bash()
    kept = 0
    for number in range(8):
        try:
            await bash.run(f"kept={number}")
            result = await bash.run("while :; do env true; done", timeout=0.2)
            expect(result.timed_out and result.seconds < GRACE, result)
            result = await bash.run("echo $kept")
            expect(result.output == f"{number}\n", result)
            kept += 1
        except SessionDiedError as error:
            expect(error.timed_out, error)
    expect(kept >= 6, kept)


async def bash_characters(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A character that arrives in two parts is one character; one that the limit would cut is left out."""
    bash = await sandbox.bash()
    result = await bash.run("printf '\\xe2\\x82'; sleep 0.2; printf '\\xac\\n'")
    expect(result.output == "€\n", result)
    for limit in (1000, 1001, 1002, 1003):
        result = await bash.run("printf '€%.0s' {1..3000}", output_limit=limit)
        expect_cut(result, limit)


async def bash_early_output(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Output of a command arrives while it runs, whole characters at a time, and up to the limit."""
    bash, printed, seen = await sandbox.bash(), anyio.Event(), list[str]()

    def see(output: SessionOutput) -> None:
        seen.append(output.formats["text/plain"])
        printed.set()

    command = "printf 'a\\xe2\\x82'; until [ -e on ]; do sleep 0.01; done; printf '\\xacb'; head -c 5000 /dev/zero"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: bash.run(command, timeout=30, output_limit=1000, on_output=see))
        with anyio.fail_after(20):
            await printed.wait()
        expect(seen == ["a"], seen)
        await sandbox.write_file("on", "")
    expect("left out" in seen[-1] and len("".join(seen)) < 1100, seen)
    await bash.run("printf 'a\\xe2\\x82'; sleep 0.1; printf '\\xacb'", on_output=see)
    expect("".join(seen).endswith("a€b"), seen[-3:])
