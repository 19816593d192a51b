"""After kill -9 of services that write to one folder, every record whose reference was given out can be read."""

import signal
import subprocess
import sys
from pathlib import Path

import anyio

from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.folder import SegmentReader
from rollout_service.store.segments.proof import MARK_FILE, FolderMark, FolderProof

ROOT = Path(__file__).parents[3]
RECORDS = 300
WRITER = """
import os, sys
from pathlib import Path
import anyio
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.proof import FolderMark, FolderProof
from rollout_service.store.segments.writer import SegmentWriter
from tests.support.store.segments import MemoryLedger

async def write(writer, number):
    while True:
        number += 100
        async with writer.keep([b"%d" % number * 1000]) as (reference,):
            os.write(1, f"{reference} {number}\\n".encode())

async def main():
    files, name = SharedFiles(Path(sys.argv[1])), sys.argv[2]
    proof = FolderProof(files, FolderMark("store", "mark"))
    writer = SegmentWriter(files, proof, MemoryLedger(), owner=name, name=name, file_bytes=200_000)
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(write, writer, number)

anyio.run(main)
"""


def write_until_killed(folder: Path, name: str) -> dict[str, int]:
    """Return the number of each record by its reference."""
    command = [sys.executable, "-c", WRITER, str(folder), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        lines = [process.stdout.readline() for _ in range(RECORDS)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    words = [line.split() for line in lines if line.endswith("\n")]
    return {reference: int(number) for reference, number in words}


def test_what_was_written_before_a_kill_can_be_read(tmp_path):
    (tmp_path / MARK_FILE).write_text('{"store": "store", "mark": "mark"}')
    written: dict[str, int] = {}
    for number in range(2):
        written |= write_until_killed(tmp_path, f"{number:012x}")

    async def read() -> list[object]:
        files = SharedFiles(tmp_path)
        reader = SegmentReader(files, FolderProof(files, FolderMark("store", "mark")))
        return list(await reader.read_all({text: text for text in written}))

    assert len(written) >= RECORDS * 2
    assert anyio.run(read) == [b"%d" % number * 1000 for number in written.values()]
