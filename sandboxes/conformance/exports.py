"""Files exported from a sandbox for grading: read by the host alone, without anything a grader should never meet."""

import io
import tarfile
from contextlib import suppress

import anyio

from sandboxes.conformance.expectations import expect, expect_error
from sandboxes.contract import Sandbox, SandboxProvider
from sandboxes.errors import FileMissingError, FileTooLargeError

MIB = 1024 * 1024
TREE = r"""
set -e
mkdir -p out/d/e && cd out
echo hi >d/file && ln d/file hard && chmod 6755 d/file
ln -s d/file inside; ln -s ../file d/e/up; ln -s nothing dangling
ln -s /etc/passwd absolute; ln -s ../../etc/passwd relative; ln -s d/../../.. through; ln -s ../../.. d/e/top
ln -s / root
mkfifo pipe
printf 'line' >"$(printf 'a\nb')"
touch -d '1950-01-01' old; touch -d '2200-01-01' new
"""
PLANTED = r"""
for name in tar bash sh python3 stat cat; do
  for folder in /usr/local/sbin /usr/local/bin /bin /usr/bin; do
    if [[ -w $folder && ( $folder == /usr/local/* || $name == tar ) ]]; then
      printf '#!/bin/sh\necho ran >>%s/ran\nexit 1\n' "$PWD" >$folder/.new && chmod 755 $folder/.new &&
        mv -f $folder/.new $folder/$name
    fi
  done
done
{ echo "$PWD/none.so" >/etc/ld.so.preload; } 2>/dev/null
exit 0
"""


async def exported_entries(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Folders, files and inner links are exported; devices, pipes, links that lead out and rights are not."""
    result = await sandbox.exec(["bash", "-c", TREE])
    expect(result.exit_code == 0, result)
    entries = await _exported(sandbox, "out")
    kinds = {entry.name: entry.type for entry in entries}
    files = {"out/d/file", "out/a\nb", "out/old", "out/new"}
    hard = {name for name, kind in kinds.items() if kind == tarfile.LNKTYPE}
    expect(len(hard & {"out/hard", "out/d/file"}) == 1 and len(hard) == 1, kinds)
    expect({name for name, kind in kinds.items() if kind == tarfile.REGTYPE} - {"out/hard"} >= files - hard, kinds)
    links = {entry.name: entry.linkname for entry in entries if entry.issym()}
    expect(links == {"out/inside": "d/file", "out/d/e/up": "../file", "out/dangling": "nothing"}, links)
    expect({entry.name for entry in entries if entry.isdir()} == {"out", "out/d", "out/d/e"}, kinds)
    expect(all(entry.mode & ~0o777 == 0 and entry.uid == entry.gid == 0 for entry in entries), entries)
    expect(all(entry.mtime >= 0 for entry in entries), entries)
    await expect_error(FileMissingError, _exported(sandbox, "out/nothing"))


async def exported_without_programs(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """No program, library or setting of the sandbox takes part in an export, and modes cannot forbid it to read."""
    await sandbox.exec(["bash", "-c", "mkdir -p out/d && echo hi >out/d/file && chmod 000 out/d/file out/d"])
    if provider.isolates:
        await sandbox.exec(["bash", "-c", PLANTED])
        await sandbox.end_processes()
        names = {entry.name for entry in await _exported(sandbox, ".")}
        expect(not any(name.endswith("/ran") for name in names), names)
        entries = await _exported(sandbox, "out")
        expect([entry.name for entry in entries] == ["out", "out/d", "out/d/file"], entries)
        expect(all(entry.mode & 0o400 for entry in entries), entries)


async def exported_within_limits(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Holes count with their full size, entries as at least a page, and depth is bounded."""
    made = "truncate -s 900M sparse; mkdir many; cd many; for ((i = 0; i < 600; i++)); do : >$i; done"
    await sandbox.exec(["bash", "-c", made])
    await expect_error(FileTooLargeError, _exported(sandbox, "sparse"))
    await expect_error(FileTooLargeError, _exported(sandbox, "many", 2 * MIB))
    await sandbox.exec(["bash", "-c", "for ((i = 0; i < 400; i++)); do mkdir d; cd d; done"], timeout=120)
    await expect_error(FileTooLargeError, _exported(sandbox, "d"))
    # One that could be written, and not be unpacked anywhere.
    long = "mkdir long; cd long; n=$(printf 'n%.0s' {1..240}); for ((i = 0; i < 40; i++)); do mkdir $n; cd $n; done"
    await sandbox.exec(["bash", "-c", long])
    await expect_error(FileTooLargeError, _exported(sandbox, "long"))


async def exported_out_of_reach(sandbox: Sandbox, _: SandboxProvider) -> None:
    """No link leads to files that only the host can see or to the kernel's own, and circular links end."""
    commands = (
        "ln -s /proc/1/root/etc proc; ln -s ring ring; ln -s /proc/self/root self; mkdir real; touch real/f; "
        "ln -s /sys sys; ln -s /proc kernel"
    )
    await sandbox.exec(["bash", "-c", commands])
    for path in ("self/etc/passwd", "ring/file", "proc", "ring", "sys/kernel", "kernel/sys"):
        with anyio.fail_after(30), suppress(FileMissingError):
            entries = await _exported(sandbox, path)
            expect(entries == [], (path, entries))


async def ended_for_good(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """Processes that left their group, session and parent are ended all the same, and where code is kept from the
    host, those too that go on in a new process all the time."""
    daemon = "import os, time\nfor _ in range(3):\n if os.fork(): os._exit(0)\n os.setsid()\n"
    daemon += "while True:\n open('beat', 'a').write('x')\n time.sleep(0.05)\n"
    daemon += " if os.fork(): os._exit(0)\n" if provider.isolates else ""
    bash = await sandbox.bash()
    await bash.run(f'python3 -c "{daemon}" </dev/null >/dev/null 2>&1 &')
    with anyio.fail_after(30):
        while not await _size(sandbox, "beat"):  # noqa: ASYNC110  it is another process's doing
            await anyio.sleep(0.1)
    await sandbox.end_processes()
    before = await _size(sandbox, "beat")
    await anyio.sleep(0.5)
    expect(await _size(sandbox, "beat") == before, "it lives on")


async def _size(sandbox: Sandbox, name: str) -> int:
    return next((entry.size for entry in await sandbox.list() if entry.name == name), 0)


async def _exported(sandbox: Sandbox, path: str, limit: int = 64 * MIB) -> list[tarfile.TarInfo]:
    packed = b"".join([part async for part in sandbox.export_path(path, limit=limit)])
    with tarfile.open(fileobj=io.BytesIO(packed), encoding="utf-8", errors="surrogateescape") as archive:
        return archive.getmembers()
