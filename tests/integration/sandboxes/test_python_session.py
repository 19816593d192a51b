"""A Python session gives code what any IPython kernel does, although the kernel starts with less."""

import sys

import anyio
import pytest

from sandboxes import LocalConfig, make_provider
from sandboxes.contract import PythonResult, PythonSession, Sandbox, SandboxSpec
from sandboxes.errors import SandboxClosedError, SandboxStartError
from sandboxes.limits.token_bucket import TokenBucket


@pytest.fixture
async def python(local_sandbox: Sandbox) -> PythonSession:
    return await local_sandbox.python()


@pytest.mark.parametrize(
    ("code", "output", "result"),
    [
        ("import asyncio\nawait asyncio.sleep(0.05)\nprint('awaited')\n5", "awaited\n", "5"),
        ("import asyncio\nasyncio.get_running_loop().is_running()", "", "True"),
        (
            "import threading\nt = threading.Thread(target=print, args=['thread'])\nt.start(); t.join()",
            "thread\n",
            None,
        ),
        ("import os\nos.system('echo system')", "system\n", "0"),
        ("import subprocess\nsubprocess.run(['echo', 'run']).returncode", "run\n", "0"),
        ("import sys\nprint('error', file=sys.stderr)", "error\n", None),
        ("print('no newline', end='')", "no newline", None),
        ("from IPython.display import display\ndisplay(1)\n2", "1\n", "2"),
        ("%precision 2\n1 / 3", "", "0.33"),
        ("!echo shell", "shell\r\n", None),
        ("import jupyter_client\njupyter_client.KernelManager.__name__", "", "'KernelManager'"),
        ("from jupyter_client import find_connection_file, __version__ as v\nlen(v) > 3", "", "True"),
        ("import gc\ngc.isenabled()", "", "True"),
        ("import sys\n'manager' in dir(sys.modules.get('jupyter_client')), sys.path.count('')", "", "(False, 1)"),
        ("__name__, 'main' in dir(), 'cut' in dir()", "", "('__main__', False, False)"),
    ],
)
async def test_cells(python, code, output, result):
    found = await python.execute(code, timeout=20)
    assert (found.output, found.result, found.error) == (output, result, None)


@pytest.mark.parametrize(
    ("leave", "value"), [("exit()", "None"), ("quit()", "None"), ("exit(1)", "1"), ("get_ipython().ask_exit()", "None")]
)
async def test_a_cell_that_exits_ends_there_and_the_session_goes_on(python, leave, value):
    await python.execute("kept = 41")
    left = await python.execute(f"print('before')\n{leave}\nprint('after')")
    assert (left.output, left.error.ename, left.error.evalue) == ("before\n", "SystemExit", value)
    for number in range(4):
        await anyio.sleep(0.05)  # the kernel of a notebook would end now
        assert (await python.execute(f"kept + {number}")).result == str(41 + number)


async def test_classes_of_the_session_can_be_pickled_to_other_processes(python):
    code = "import multiprocessing\ndef twice(x): return 2 * x\n"
    code += "with multiprocessing.get_context('fork').Pool(2) as p: print(p.map(twice, [1, 2]))"
    found = await python.execute(code, timeout=30)
    assert (found.output, found.error) == ("[2, 4]\n", None)


async def test_an_awaiting_cell_is_interrupted_and_the_session_goes_on(python):
    found = await python.execute("x = 7\nimport asyncio\nawait asyncio.sleep(30)", timeout=1)
    assert found.timed_out
    assert (await python.execute("x")).result == "7"


LOSE_THE_REPLY = """
kept, session = 7, get_ipython().kernel.session
def lose(stream, message, *arguments, send=session.send, **named):
    if message != "execute_reply":
        return send(stream, message, *arguments, **named)
    session.send = send
    raise KeyboardInterrupt
session.send = lose
"""


async def test_an_interrupt_in_place_of_a_reply_ends_the_cell_and_the_session_goes_on(python):
    found = await python.execute(LOSE_THE_REPLY, timeout=60)
    assert (found.error.ename, found.timed_out) == ("KeyboardInterrupt", False)
    assert (await python.execute("kept")).result == "7"


async def test_the_session_is_handed_out_while_a_cell_runs(local_sandbox, python):
    results: list[PythonResult] = []

    async def sleep() -> None:
        results.append(await python.execute("open('begun', 'w'); import time; time.sleep(60)"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleep)
        await local_sandbox.exec(["bash", "-c", "until [ -e begun ]; do sleep 0.05; done"])
        with anyio.fail_after(20):
            await (await local_sandbox.python()).interrupt()
    assert (results[0].error.ename, results[0].timed_out) == ("KeyboardInterrupt", False)


@pytest.mark.parametrize("again", [False, True], ids=["first start", "wait for another"])
async def test_a_sandbox_that_is_closed_before_its_kernel_is_ready_says_so(local_sandbox, again):
    if again:
        session = await local_sandbox.python()
        session.discard()
        session._restarts = TokenBucket(0, 0.2)

    async def close() -> None:
        await anyio.sleep(0.05)
        await local_sandbox.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        with pytest.raises(SandboxClosedError):
            await (session.execute("1") if again else local_sandbox.python())


async def test_output_in_the_order_it_was_made(python):
    code = "import sys\nfor i in range(50):\n    print(i)\n    display(-i)\n    sys.stdout.flush()"
    found = await python.execute(code)
    assert found.output.split() == [str(text) for number in range(50) for text in (number, -number)]


async def test_the_output_of_a_process_belongs_to_the_cell_that_waited_for_it(python):
    for number in range(100):
        found = await python.execute(f"import os\nos.system('echo {number}; echo {number} >&2') == 0")
        assert (sorted(found.output.split()), found.result) == ([str(number)] * 2, "True")


WITHOUT_A_PART = """#!/bin/sh
exec {python} -c '
import runpy, sys
from ipykernel import iostream
del iostream.OutStream._flush_buffers
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
' "$@"
"""


async def test_a_kernel_without_a_required_part_is_refused_by_name(tmp_path):
    python = tmp_path / "python"
    python.write_text(WITHOUT_A_PART.format(python=sys.executable))
    python.chmod(0o755)
    provider = make_provider(LocalConfig(provider="local", python=python), tmp_path)
    try:
        async with await provider.start(SandboxSpec()) as sandbox:
            with pytest.raises(SandboxStartError, match=r"ipykernel .* has no OutStream\._flush_buffers") as caught:
                await sandbox.python()
            assert "6.29 to 7" in (caught.value.hint or "")
    finally:
        await provider.close()
