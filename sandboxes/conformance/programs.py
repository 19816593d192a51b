"""Programs outside the sessions: streams, exit codes, timeouts, many at once."""

import time

import anyio

from sandboxes.conformance.expectations import GRACE, expect
from sandboxes.contract import Sandbox, SandboxProvider

NAMES = ("count", "mode", "pipe", "pipes", "groups", "message", "max_processes", "max_data")
"""Variables that mean nothing to programs, and something to the shell that starts them."""


async def exec_programs(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Each program has its own streams, input, environment and folder, and an exact exit code."""
    data = bytes(range(256)) * 4000
    result = await sandbox.exec(["cat"], stdin=data, output_limit=2 * len(data))
    expect(result.exit_code == 0 and result.stdout == data, result.exit_code)
    script = 'echo "$1" "$GIVEN"; pwd >&2; exit 3'
    result = await sandbox.exec(["bash", "-c", script, "-", "a 'b"], env={"GIVEN": "x y"}, cwd="/")
    expect((result.exit_code, result.stdout, result.stderr) == (3, b"a 'b x y\n", b"/\n"), result)
    values = " ".join(f'"${name}"' for name in NAMES)
    script = f"printf %s, {values}; ulimit -u -d"
    limits = (await sandbox.exec(["bash", "-c", script])).stdout.lstrip(b",")
    result = await sandbox.exec(["bash", "-c", script], env=dict.fromkeys(NAMES, "0"))
    expect((result.exit_code, result.stdout) == (0, b"0," * len(NAMES) + limits), result)
    expect((await sandbox.exec(["no-such-program"])).exit_code == 127, "no 127")
    expect((await sandbox.exec(["bash", "-c", "kill -9 $$"])).exit_code == 137, "no 137")
    result = await sandbox.exec(["bash", "-c", "echo part; sleep 60"], timeout=0.5)
    expect(result.timed_out and result.exit_code is None and result.stdout == b"part\n", result)
    result = await sandbox.exec(["head", "-c", "5000000", "/dev/zero"], output_limit=100)
    expect(result.truncated and len(result.stdout) < 300, result)


async def exec_apart(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Programs run concurrently with a busy session and with each other."""
    bash = await sandbox.bash()
    begun = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bash.run, "sleep 2")
        for _number in range(8):
            tasks.start_soon(sandbox.exec, ["sleep", "2"])
    expect(time.monotonic() - begun < 2 + GRACE, time.monotonic() - begun)


async def exec_at_once(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Two dozen concurrent programs each have their own input and output."""
    found: dict[int, bytes] = {}

    async def run(number: int) -> None:
        data = f"{number} ".encode() * 20_000
        found[number] = (await sandbox.exec(["cat"], stdin=data, output_limit=2 * len(data))).stdout

    async with anyio.create_task_group() as tasks:
        for number in range(24):
            tasks.start_soon(run, number)
    for number, data in found.items():
        expect(data == f"{number} ".encode() * 20_000, (number, data[:100], len(data)))


async def exec_cancelled(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A cancelled call ends its program and everything that it started."""
    with anyio.move_on_after(0.5):
        await sandbox.exec(["bash", "-c", "(sleep 2; touch reached) & sleep 2; touch reached"])
    result = await sandbox.exec(["bash", "-c", "sleep 3; ls"])
    expect(result.stdout == b"", result)


async def program_answers(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A running program answers its input, sees the end of its input, and ends with its block."""
    script = 'echo started >&2; while read -r line; do echo "got $line"; done; echo end; exit 3'
    async with sandbox.program(["bash", "-c", script]) as program:
        for number in range(3):
            expect(await program.send(f"{number}\n".encode()), "it takes nothing")
            expect(await program.receive() == f"got {number}\n".encode(), number)
        program.close_input()
        expect(await program.receive() == b"end\n", "no last line")
        expect((await program.receive(), await program.wait()) == (b"", 3), "no end")
        expect(program.errors() == "started\n", program.errors())
    async with sandbox.program(["bash", "-c", "(sleep 2; touch reached) & echo up; sleep 2; touch reached"]) as left:
        expect(await left.receive() == b"up\n", "not started")
    script = 'echo up >&2; (sleep 1; touch left) & read -r -a fields </proc/$$/stat; echo "${fields[4]}"'
    async with sandbox.program(["bash", "-c", script]) as program:
        expect(await program.receive() == f"{program.group}\n".encode(), program.group)
        expect((await program.receive_errors(), program.errors()) == (b"up\n", ""), "no errors")
        await program.wait()
        program.leave_group()
    async with sandbox.program(["no-such-program"]) as missing:
        expect(await missing.wait() == 127, "no 127")
        expect(not await missing.send(b"x" * 1_000_000), "it takes input after its end")
    result = await sandbox.exec(["bash", "-c", "sleep 3; ls"])
    expect(result.stdout == b"left\n", result)
