"""A server that a command starts for itself."""

import pytest

from rollout_service.cli import server_child
from rollout_service.cli.common import CommandError
from rollout_service.cli.server_child import running_server


@pytest.mark.slow
async def test_a_start_says_what_it_waits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(server_child, "SAY_SECONDS", 0.05)
    said: list[str] = []
    with pytest.raises(CommandError, match="it does not listen yet"):
        async with running_server(tmp_path, ["--sandbox", "local"], start_seconds=0.3, say=said.append):
            pass
    assert said
    assert all(line.endswith(" s: it does not listen yet") for line in said)
