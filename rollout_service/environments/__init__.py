"""Environments, which turn a task into an episode: built-in ones and plug-ins.

Authors of environments and tools import everything from here; these names stay.
"""

from typing import TYPE_CHECKING

from rollout_client import load_lazily

if TYPE_CHECKING:
    from rollout_service.agents.tool_calling.tools import Arguments as Arguments
    from rollout_service.agents.tool_calling.tools import FunctionTool as FunctionTool
    from rollout_service.agents.tool_calling.tools import Tool as Tool
    from rollout_service.agents.tool_calling.tools import ToolContext as ToolContext
    from rollout_service.agents.tool_calling.tools import ToolInputError as ToolInputError
    from rollout_service.agents.tool_calling.tools import ToolResult as ToolResult
    from rollout_service.base.errors import ConfigurationError as ConfigurationError
    from rollout_service.base.errors import EnvironmentFailedError as EnvironmentFailedError
    from rollout_service.base.errors import InvalidFieldError as InvalidFieldError
    from rollout_service.environments.agent_environment import AgentEnvironment as AgentEnvironment
    from rollout_service.environments.contract import Environment as Environment
    from rollout_service.environments.contract import EnvironmentSpec as EnvironmentSpec
    from rollout_service.environments.contract import EvaluateIn as EvaluateIn
    from rollout_service.environments.contract import Replayable as Replayable
    from rollout_service.environments.contract import SandboxSettings as SandboxSettings
    from rollout_service.episodes import Episode as Episode
    from rollout_service.episodes import EpisodeLimits as EpisodeLimits
    from rollout_service.episodes import PolicyTurn as PolicyTurn
    from rollout_service.episodes import Score as Score
    from rollout_service.episodes import require_sandbox as require_sandbox
    from rollout_service.judging.contract import Judge as Judge
    from rollout_service.judging.contract import TextSampler as TextSampler
    from rollout_service.judging.rubric import Rubric as Rubric
    from rollout_service.judging.rubric import RubricSettings as RubricSettings
else:
    _HERE = "rollout_service.environments"
    _TOOLS = "rollout_service.agents.tool_calling.tools"
    _HOMES = {
        **dict.fromkeys(("Arguments", "FunctionTool", "Tool", "ToolContext", "ToolResult"), _TOOLS),
        "ToolInputError": "rollout_service.agents.tool_calling.tools",
        **dict.fromkeys(
            ("ConfigurationError", "EnvironmentFailedError", "InvalidFieldError"),
            "rollout_service.base.errors",
        ),
        "AgentEnvironment": f"{_HERE}.agent_environment",
        **dict.fromkeys(
            ("Environment", "EnvironmentSpec", "EvaluateIn", "Replayable", "SandboxSettings"),
            f"{_HERE}.contract",
        ),
        **dict.fromkeys(
            ("Episode", "EpisodeLimits", "PolicyTurn", "Score", "require_sandbox"), "rollout_service.episodes"
        ),
        **dict.fromkeys(("Judge", "TextSampler"), "rollout_service.judging.contract"),
        **dict.fromkeys(("Rubric", "RubricSettings"), "rollout_service.judging.rubric"),
    }
    __getattr__ = load_lazily(globals(), _HOMES)
