"""Warm sandboxes and overlays of real Apptainer."""

import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from sandboxes import ApptainerConfig, SandboxSpec, make_provider
from sandboxes.config import WarmPoolConfig
from sandboxes.scheduling.warm_pool import WarmPool
from tests.support.waiting import until

pytestmark = pytest.mark.apptainer

SPEC = SandboxSpec(sessions=frozenset({"bash", "python"}), memory_bytes=512 * 1024**2, label="r")
CEILING = 4


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WarmPool]:
    provider = make_provider(ApptainerConfig(), tmp_path)
    pool = WarmPool(provider, WarmPoolConfig(size=1), ceiling=CEILING)
    try:
        async with pool.running():
            yield pool
    finally:
        await pool.close()
        assert provider.live() == []


async def warmed(pool: WarmPool) -> None:
    await until(lambda: pool.warm, 60)


async def test_a_warm_sandbox_comes_in_milliseconds_with_live_sessions(pool):
    await (await pool.start(SPEC)).close()
    seconds, seen = [], set()
    for number in range(5):
        await warmed(pool)
        began = time.perf_counter()
        sandbox = await pool.start(replace(SPEC, label=f"r{number}"))
        seconds.append(time.perf_counter() - began)
        async with sandbox:
            assert sandbox.id not in seen
            seen.add(sandbox.id)
            assert f"r{number}" in {info.label for info in pool.live()}
            assert (await (await sandbox.bash()).run("ls; pwd")).output == "/workspace\n"
            assert (await (await sandbox.python()).execute("6 * 7")).result == "42"
            assert len(pool.live()) <= CEILING
    assert median(seconds) < 0.02


async def test_without_the_python_session_no_kernel_is_started(pool):
    spec = replace(SPEC, sessions=frozenset({"bash"}))
    await (await pool.start(spec)).close()
    await warmed(pool)
    async with await pool.start(spec) as sandbox:
        found = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])
        assert b"ipykernel" not in found.stdout
        assert b"--noediting" in found.stdout


CHANGE = """
set -eu
rm -r /usr/share/doc
test ! -e /usr/share/doc
mkdir /usr/share/doc
test -z "$(ls -A /usr/share/doc)"
mv /usr/share/perl5 /workspace/perl5
test ! -e /usr/share/perl5
ls /workspace/perl5/Debconf
"""
RENAME = "import os; os.rename('/usr/share/bash-completion', '/usr/share/renamed')"


async def test_folders_of_the_image_are_removed_and_renamed(provider):
    assert provider.known_failures == {}
    async with await provider.start(SandboxSpec()) as sandbox:
        changed = await sandbox.exec(["bash", "-c", CHANGE])
        assert changed.exit_code == 0, changed.stderr
        renamed = await sandbox.exec(["python3", "-c", RENAME])
        expected = b"" if os.geteuid() == 0 else b"Invalid cross-device link"
        assert expected in renamed.stderr
        assert renamed.exit_code == (0 if os.geteuid() == 0 else 1)
    async with await provider.start(SandboxSpec()) as sandbox:
        untouched = await sandbox.exec(["ls", "/usr/share/doc", "/usr/share/perl5/Debconf"])
        assert untouched.exit_code == 0, "the next sandbox has the image as it was"
