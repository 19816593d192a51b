"""The state of a shell as a script: whatever values it holds, another shell gets them, and the first keeps its own."""

import shlex
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.errors import SandboxUnsavedError
from sandboxes.sessions.bash_state import MAX_BYTES, archive_state, make_dump, parse_dump, read_state

TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
SHELL = ("bash", "--norc", "--noprofile")
ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "EXPORTED": "of the first"}


def run(script: str) -> str:
    done = subprocess.run(SHELL, input=script.encode(), capture_output=True, env=ENV, check=False, timeout=30)
    assert done.stderr == b""
    return done.stdout.decode()


def described(setup: str) -> tuple[str, str]:
    """Return the script that describes a shell after some commands, and what it prints about itself afterward."""
    command, nonce = make_dump()
    said = run(f"{setup}\neval {shlex.quote(command)}\n{ASK}")
    output, _, asked = said.partition(f"end {nonce}\n")
    return parse_dump(f"{output}end {nonce}\n", nonce).decode(), asked


ASK = 'printf "%s\\0" "$?" "$text" "${list[@]}" "${!map[@]}" "${map[@]}" "$@" "$PWD" "$-" "${EXPORTED-unset}"; trap -p'


@given(text=TEXTS, items=st.lists(TEXTS, max_size=3), key=TEXTS.filter(bool), flags=st.sets(st.sampled_from("fuC")))
@settings(max_examples=25, deadline=None)
def test_another_shell_has_any_values(text: str, items: list[str], key: str, flags: set[str]) -> None:
    setup = "\n".join(
        [
            f"text={shlex.quote(text)}; list=({shlex.join(items)}); declare -A map=([{shlex.quote(key)}]=value)",
            f"set -- {shlex.join(items)}; trap {shlex.quote(f': {shlex.quote(text)}')} USR2; cd /usr; unset EXPORTED",
            *(f"set -{flag}" for flag in sorted(flags)),
            "(exit 7)",
        ]
    )
    script, itself = described(setup)
    assert itself == run(f"{setup}\n{ASK}"), "the first shell has changed"
    assert run(f"eval {shlex.quote(script)}\n{ASK}") == itself


def test_the_archive_begins_with_the_script(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for script in (b"", b"x=1\n", bytes(range(1, 256)) * 5):
        path.write_bytes(archive_state(script))
        assert read_state(path) == script
    for damaged in (b"", b"no archive", archive_state(b"x=1\n")[:100]):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match="saved"):
            read_state(path)


@pytest.mark.parametrize(
    "limits", ["(" * MAX_BYTES, "(" + ", " * (MAX_BYTES // 2), "(-a)" + " " * MAX_BYTES], ids=["(", ",", "spaces"]
)
def test_no_text_takes_long(limits: str) -> None:
    """Code inside may replace the builtins that describe its shell, and the event loop waits."""
    begun = time.process_time()
    assert parse_dump(f"begin N\nlimits N\n{limits}\nmax (kbytes, -m) 5\nend N\n", "N") == b"ulimit -S -m 5\n"
    assert time.process_time() - begun < 1


@pytest.mark.parametrize("output", ["", "begin N\n", "begin N\nlimits N\n", "begin N\nx=\ufffd\nlimits N\nend N\n"])
def test_a_shell_that_does_not_describe_itself_is_not_saved(output: str) -> None:
    with pytest.raises(SandboxUnsavedError):
        parse_dump(output, "N")


async def test_a_state_that_is_too_large_is_not_cut(local_sandbox) -> None:
    shell = await local_sandbox.bash()
    for length, fits in ((MAX_BYTES // 2, True), (MAX_BYTES, False)):
        await shell.run(f"large=$(head -c {length} /dev/zero | tr '\\0' x)")
        with nullcontext() if fits else pytest.raises(SandboxUnsavedError, match="more than"):
            assert b"x" * length in await shell.describe()


async def test_a_start_that_is_cancelled_within_the_state_is_begun_anew(local_sandbox) -> None:
    shell = local_sandbox._shell
    shell.state = b"kept=" + b"x" * MAX_BYTES + b"\n"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(local_sandbox.bash)
        while not shell.is_open:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    with anyio.fail_after(60):
        found = await shell.run("echo ${#kept}")
    assert found.output == f"{MAX_BYTES}\n"
