"""The server of E2B's API and its sandboxes are not believed beyond what they may say."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import anyio
import e2b
import pytest

from sandboxes import FileTooLargeError
from sandboxes.config import E2BConfig
from sandboxes.providers.e2b import provider, remote
from sandboxes.providers.e2b.provider import E2BSandbox
from sandboxes.providers.e2b.remote import Client

ENDLESS = "import os\nwhile True: os.write(1, bytes(65536))"


async def test_an_export_that_does_not_end_is_cut_at_its_limit(local_sandbox, monkeypatch):
    monkeypatch.setattr(provider, "READER", ENDLESS)
    sandbox: Any = SimpleNamespace(_launched=local_sandbox._launched)
    with pytest.raises(FileTooLargeError), anyio.fail_after(20):
        await consume(E2BSandbox._export(sandbox, "/", 1_000_000))


async def consume(parts: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(parts):
        async for _ in parts:
            pass


async def test_a_sandbox_that_is_killed_at_the_second_try_is_killed(monkeypatch):
    answers = iter([e2b.TimeoutException("too late"), None])

    async def kill(*_: object, **__: object) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(e2b.AsyncSandbox, "kill", kill)
    monkeypatch.setattr(remote, "KILL_PAUSES", (0.0, 0.0))
    monkeypatch.setenv("E2B_API_KEY", "x")
    assert await Client(E2BConfig(provider="e2b")).kill("some")
