"""Play a task of an OpenEnv server as verifiers does: `verifiers_player.py PACKAGES URL INDEX REPLY...`.

Run it with the interpreter that has verifiers; PACKAGES is the folder with OpenEnv. The policy is a list of replies.
Prints the messages that it saw, and the rewards that were recorded.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

packages, url, index, *replies = sys.argv[1:]
sys.path.append(packages)
# OpenEnv imports this for servers with tools. It needs another `mcp` than verifiers, and takes no part in a client.
for name in ("fastmcp", "fastmcp.client", "fastmcp.client.client"):
    sys.modules[name] = MagicMock()

from verifiers.v1.tasksets.openenv.taskset import (  # noqa: E402
    OpenEnvConfig,
    OpenEnvEnv,
    OpenEnvTaskset,
)

seen: list[Any] = []
rewards: dict[str, float] = {}


class Player:
    """The side of the model."""

    @asynccontextmanager
    async def interaction(self, _task: object) -> AsyncIterator[SimpleNamespace]:
        async def take_turn(payload: str) -> SimpleNamespace:
            seen.append(json.loads(payload)["observation"]["messages"])
            return SimpleNamespace(terminated=False, last_reply=replies.pop(0))

        trace = SimpleNamespace(record_reward=rewards.__setitem__)
        yield SimpleNamespace(turn=take_turn, trace=trace)


(task,) = OpenEnvTaskset(OpenEnvConfig(base_url=url, resets=[{"index": int(index)}])).load()
asyncio.run(OpenEnvEnv.run(MagicMock(), task, SimpleNamespace(player=Player())))
print(json.dumps({"seen": seen, "rewards": rewards}))  # noqa: T201 - the result
