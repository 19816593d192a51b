"""Saved sandboxes: another one goes on where the first was, with its files and its bash, or nothing is saved."""

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from sandboxes.conformance.expectations import (
    GRACE,
    LOOK,
    OPEN,
    expect,
    expect_error,
    expect_walls,
    said,
    walls,
    write_files,
)
from sandboxes.contract import Sandbox, SandboxProvider
from sandboxes.errors import FileTooLargeError, SandboxConfigError, SandboxUnsavedError

SHELL = r"""
cd kept; umask 027; set -o noclobber; set -f; shopt -s extglob nullglob; alias hi='echo "aliased"'
plain="two  words 'and' \$HOME"; export SHOWN=$'line\nbreak\u00e9'; declare -i number=7; readonly FIXED=1; unset LANG
declare -A map=([a b]=1 [c]='"'); list=(x 'y z' ''); declare -n ref=plain; IFS=,
greet() { echo "hello $1"; }; export -f greet; matches() { [[ $1 == @(me|you) ]]; }
true & last=$!; wait
trap 'echo trapped' USR1; set -- one 'two 2'; pushd deep >/dev/null; pushd / >/dev/null; ulimit -S -n 500
"""
ASK = r"""
printf '%s|' "$?" "$PWD" "$OLDPWD" "$(umask)" "$-" "$plain" "$SHOWN" "$number" "${map[a b]}" "${map[c]}" "${#list[@]}"
printf '%s|' "${list[1]}" "$ref" "${LANG-unset}" "$1" "$2" "$#" "$(dirs)" "$(ulimit -S -n)"; printf '%q|' "$IFS"
shopt extglob nullglob; trap -p; alias; declare -p map list ref FIXED number; matches me && hi; bash -c 'greet you'
kill -USR1 $$; number+=1; echo $number; FIXED=2; echo done
"""


async def _is_possible(sandbox: Sandbox, provider: SandboxProvider) -> bool:
    """Return whether sandboxes can be saved; if not, see that it is refused."""
    if await provider.saves(sandbox.spec):
        return True
    await expect_error(SandboxConfigError, _save(sandbox))
    return False


@asynccontextmanager
async def _saved(sandbox: Sandbox) -> AsyncIterator[Path]:
    """Yield a file with what was saved."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "saved")
        await _save(sandbox, path)
        yield path


async def _save(sandbox: Sandbox, path: Path = Path(os.devnull), limit: int = 1 << 30) -> int:
    """Return the length of what is saved."""
    with path.open("wb") as file:
        async with aclosing(sandbox.save(limit=limit)) as parts:
            return sum([file.write(part) async for part in parts])


async def saved_has_files(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A sandbox that begins with what was saved has the files, with modes, links and times; the first one goes on."""
    removed = await write_files(sandbox, provider)
    async with _saved(sandbox) as saved:
        look = f"{LOOK}{OPEN}ls -d {removed} 2>&1 | wc -l"
        async with await provider.start(replace(sandbox.spec, saved=saved)) as other:
            found = await said(other, look)
            expect(found == await said(sandbox, look), found)
            expect("first\na\0bsecret\n1\n" in found, found)
            await said(other, "echo changed >>kept/file; rm kept/link")
            async with _saved(other) as later, await provider.start(replace(sandbox.spec, saved=later)) as third:
                found = await said(third, "cat kept/hard; ls kept/link 2>&1 | wc -l")
                expect(found == "first\nchanged\n1\n", found)
        expect(await said(sandbox, "cat kept/link") == "first\n", "the first has changed")


async def saved_has_shell(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """The bash of a sandbox that begins with what was saved is in the state of the first one's, which goes on."""
    await said(sandbox, "mkdir -p kept/deep")
    bash = await sandbox.bash()
    await bash.run(SHELL)
    async with _saved(sandbox) as saved, await provider.start(replace(sandbox.spec, saved=saved)) as other:
        first, second = await bash.run(ASK), await (await other.bash()).run(ASK)
        expect(first.output == second.output, f"{first.output}\n---\n{second.output}")
        expect((await bash.run("echo $(($! == last))")).output == "1\n", "the first has changed")
        parts = ("one|two 2|2|", "aliased\nhello you\n", "trapped\n8\n")
        expect(all(part in first.output for part in parts), first.output)


async def save_refuses_the_rest(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A sandbox with a program in the background, open files, another session or a used Python is not saved."""
    bash = await sandbox.bash()
    for begin, end in (
        ("sleep 100 & job=$!", "kill $job; wait $job"),
        ("setsid sleep 100 >/dev/null 2>&1 </dev/null & job=$!; disown", "kill $job"),
        ("exec 5>/tmp/open", "exec 5>&-"),
        ("mkdir lost; cd lost; rmdir ../lost", "cd /"),
    ):
        await bash.run(begin)
        await expect_error(SandboxUnsavedError, _save(sandbox))
        expect((await bash.run("echo on")).output == "on\n", begin)
        await bash.run(end)
    await expect_error(FileTooLargeError, _save(sandbox, limit=4096))
    other = await sandbox.open_session("bash")
    await expect_error(SandboxUnsavedError, _save(sandbox))
    await other.close()
    with anyio.fail_after(GRACE):  # its processes end a moment later
        while (size := await _size_once_saved(sandbox)) is None:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.05)
    expect(size > 0, "it could not be saved afterward")
    await (await sandbox.python()).execute("x = 1")
    await expect_error(SandboxUnsavedError, _save(sandbox))
    expect((await (await sandbox.python()).execute("x")).result == "1", "its Python has changed")


async def _size_once_saved(sandbox: Sandbox) -> int | None:
    try:
        return await _save(sandbox)
    except SandboxUnsavedError:
        return None


async def saved_is_walled(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A sandbox that begins with what was saved has the rights, limits, mounts and network of any other."""
    async with _saved(sandbox) as saved:
        plain = await walls(sandbox, provider)
        async with await provider.start(replace(sandbox.spec, saved=saved)) as other:
            await expect_walls(other, provider, plain)
