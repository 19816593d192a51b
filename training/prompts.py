"""The variety of prompts that the tiny policies are trained on.

Half of the training uses the setup of the environment `calc`. Without the other half, a policy this small works only
with that exact prompt.
"""

from __future__ import annotations

import random
from typing import Any

from rollout_service.agents.tool_calling.builtin_tools import builtin_tools
from rollout_service.environments.builtin import calc
from rollout_service.tokens import ToolSpec
from training.examples import Setup

TOOL_FAILURES = (
    "[no output]",
    "[stopped: it took longer than 10 s]",
    "Error: no result",
    "SyntaxError: invalid syntax",
    "NameError: name 'x' is not defined",
    "Traceback (most recent call last)\nCell In[1], line 1\nValueError: bad value",
    "KeyboardInterrupt",
    "[Python was restarted, its state is lost: it was killed]",
)
"""Answers of a tool in place of a number."""

CALL_FAILURES = (
    "This call is malformed (invalid_json); nothing was run. Write it again.",
    "This call is malformed (unclosed_block); nothing was run. Write it again.",
    "wrong arguments for python: code is missing",
    "There is no tool 'pyth'. Tools: python.",
    "SyntaxError: '(' was never closed",
    "Error: this is no valid call",
)
"""Answers to a malformed call of the policy."""

_SYSTEMS = (
    "You are a helpful assistant.",
    "Solve the task with the tools.",
    "You solve arithmetic problems with the python tool. Put the final answer in \\boxed{}.",
    "Use the python tool to compute, then answer with \\boxed{answer}.",
    "You are a careful agent in a sandbox. Call tools when you need them.",
)
_VOCABULARY = (
    "you are a helpful assistant careful math solver use the python tool to compute and answer in box boxed "
    "always call execute run code return output stdout questions please be short exact calculator final "
    "session persistent sandbox command result text number task finish when done with value problem state "
    "one each its of for that is it as by from or an on at if not can may must will limit seconds file"
)
_PARAMETERS = {
    "python": ("code", "string"),
    "bash": ("command", "string"),
    "finish": ("answer", "string"),
    "edit": ("path", "string"),
}
_DESCRIPTIONS = {
    "python": "Run Python code in a persistent session and return what it prints.",
    "bash": "Run a command in a persistent shell and return its output.",
    "finish": "End the task with the final answer.",
    "edit": "View and edit a file.",
}

CALC_SETUP: Setup = (calc.SPEC.system, [tool.definition for tool in builtin_tools(calc.SPEC.tools)])
"""The setup of the environment `calc`."""


def random_setup(rng: random.Random) -> Setup:
    """Return a setup with any system text or none, and with the tool `python`, alone or among others, or no tools."""
    system = None
    if rng.random() < 0.7:
        system = rng.choice(_SYSTEMS) if rng.random() < 0.4 else _sentence(rng, 2, 14)
    if rng.random() < 0.05:
        return system, []
    others = rng.sample(["bash", "finish", "edit"], rng.choices((0, 1, 2, 3), weights=(6, 2, 1, 1))[0])
    names = ["python", *others]
    rng.shuffle(names)
    return system, [_tool(name, rng) for name in names]


def _tool(name: str, rng: random.Random) -> ToolSpec:
    parameter, kind = _PARAMETERS[name]
    field: dict[str, Any] = {"type": kind}
    if rng.random() < 0.4:
        field["description"] = _sentence(rng, 2, 8)
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {parameter: field},
        "required": [parameter],
    }
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    description = _DESCRIPTIONS[name] if rng.random() < 0.4 else _sentence(rng, 1, 16)
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(_VOCABULARY.split(), k=rng.randint(low, high))).capitalize() + "."
