"""Turns of a policy as texts, in the format of the shipped policies."""

import json

END = "<|im_end|>"


def called(name: str, /, **arguments: str) -> str:
    """Return a tool call, without the end of its turn."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turn_of(*calls: str) -> str:
    """Return a turn that makes calls."""
    return "\n".join(calls) + END


def handed_on(*tasks: str, system: str = "Read.") -> str:
    """Return a turn that assigns tasks to a new sub-agent."""
    created = called("create_subagent", name="reader", system_prompt=system)
    return turn_of(created, *(called("assign_task", agent="reader", prompt=task) for task in tasks))
