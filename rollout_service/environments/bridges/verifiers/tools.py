"""The tools of a task, which the library runs in the agent's sandbox.

Guarantees: a tool's own error is a result that the policy reads, as with the library's servers; a library that ends, or
a tool that answers no more, fails the rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rollout_service.agents.tool_calling.text import with_notes
from rollout_service.agents.tool_calling.tools import ToolContext, ToolResult
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.bridges.process import LibraryProcess
from rollout_service.tokens import ToolSpec

OPEN_SECONDS: Final = 240.0
"""The limit of importing the library and setting the tools up."""
STATE_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 3.0
"""Time beyond its limit for a tool to be stopped in its own process; the agent waits for a little longer."""


class LibraryTool:
    """One tool; implements `tool_calling.tools.Tool`."""

    parallel = False

    def __init__(self, process: LibraryProcess, definition: ToolSpec) -> None:
        self._process = process
        self.definition = definition
        self.name = str(definition["function"]["name"])

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Call it in the library's process.

        Raises:
            EnvironmentFailedError: The process has ended, or answers no more.
        """
        request = {"op": "call", "name": self.name, "arguments": arguments, "seconds": context.seconds}
        reply = await self._process.ask(request, context.seconds + GRACE_SECONDS)
        return ToolResult(with_notes(str(reply["text"]), [], context.output_chars))


async def open_tools(
    process: LibraryProcess, task: dict[str, Any], definitions: Sequence[ToolSpec]
) -> list[LibraryTool]:
    """Set the tools of a task up.

    Raises:
        EnvironmentFailedError: The library failed, or has other tools than when it was listed.
    """
    found = (await process.ask({"op": "open", "task": task}, OPEN_SECONDS))["tools"]
    tools = [LibraryTool(process, definition) for definition in definitions]
    if found != sorted(tool.name for tool in tools):
        raise EnvironmentFailedError(
            f"the task has other tools than its taskset was listed with: {', '.join(found) or 'none'}",
            hint="Restart the service, which lists the taskset again.",
        )
    return tools


async def read_state(process: LibraryProcess) -> str:
    """Return what the tools left for the rewards.

    Raises:
        EnvironmentFailedError: The process has ended.
    """
    reply = await process.ask({"op": "state"}, STATE_SECONDS)
    if "state" not in reply:  # the answer to a call that the agent's time limit cut off
        reply = await process.ask({"op": "state"}, STATE_SECONDS)
    return str(reply["state"])
