"""`nemo-gym`: rows of NeMo Gym, whose tools are answered and whose rewards are given by its own resources servers.

Guarantees: the reward is what the server gives the same conversation; the server runs in the agent's sandbox, in a
process of its own for each rollout, and neither on the host nor with a network. A failed verification fails the
rollout.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final, cast

from pydantic import JsonValue

from api_schemas.errors import FieldError
from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError, did_you_mean
from rollout_service.environments.bridges.nemo_gym.library import NAME, NEMO_GYM, TASKS, binds, servers
from rollout_service.environments.bridges.nemo_gym.rows import GymTask
from rollout_service.environments.bridges.nemo_gym.server import Beginning, GymServer, GymTool, open_server
from rollout_service.environments.bridges.turns import score_turns, take_turns
from rollout_service.environments.contract import Environment, EnvironmentSpec, SandboxSettings
from rollout_service.environments.dataset_files import read_instances
from rollout_service.environments.instance_fields import read_instance
from rollout_service.environments.libraries import Library
from rollout_service.episodes import Episode, EpisodeLimits, Score

SCORE: Final = "nemo_gym_score"
"""The key of the verdict, in an episode's state."""
SPEC = EnvironmentSpec(
    name=NAME,
    description="Rows of NeMo Gym with its own resources servers; `env install nemo-gym` installs it.",
    image="base",
    limits=EpisodeLimits(max_turns=32, max_tokens=32_768, max_turn_tokens=8_192),
    sandbox=SandboxSettings(memory="2G", max_processes=64),
)


class NemoGym(Environment):
    """Instances: a row, and the server that answers it."""

    def __init__(self, library: Library = NEMO_GYM) -> None:
        self._library = library
        self.spec = SPEC.model_copy(update={"binds": binds(library)})

    def check(self, instance: dict[str, JsonValue]) -> None:
        """Reject a row that cannot be rolled out.

        Raises:
            ConfigurationError: The library is not installed.
            InvalidFieldError: A field is missing or wrong, or there is no such server.
        """
        known = servers(self._library)
        name = read_instance(GymTask, instance).server
        if name not in known:
            message = f"NeMo Gym has no resources server {name!r}{did_you_mean(name, known)}"
            raise InvalidFieldError([FieldError(path="instance.server", message=message)])

    async def run(self, episode: Episode) -> StopReason:
        task = read_instance(GymTask, episode.instance)
        row = cast(dict[str, JsonValue], episode.instance["row"])
        async with open_server(episode.require_sandbox(), row) as server:
            beginning = await server.begin(task.server, task.config)
            messages = task.messages()
            if beginning.has_turns:
                return await _take_turns(episode, task, messages, server, beginning)
            agent = ToolCallingAgent(_tools(task, server, beginning))
            episode.policy.offer(agent.definitions)
            stop_reason = await agent.run(episode, messages)
            # Now, and not in `evaluate`: what the tools have changed ends with the server.
            said, usage = episode.policy.messages[len(messages) :], episode.policy.usage
            episode.state[SCORE] = await server.verify(said, usage, stop_reason)
            return stop_reason

    async def evaluate(self, episode: Episode) -> Score:
        score = episode.state.get(SCORE)
        if not isinstance(score, Score):
            raise EnvironmentFailedError(f"{NAME} has not verified this rollout")
        return score

    def dataset(self) -> list[dict[str, JsonValue]]:
        """Return the rows that were found when the library was installed.

        Raises:
            ConfigurationError: The library is not installed.
        """
        return [dict(one) for one in _tasks(self._library.python().parents[1] / TASKS)]


async def _take_turns(
    episode: Episode, task: GymTask, messages: list[Message], server: GymServer, beginning: Beginning
) -> StopReason:
    if task.tools():
        raise EnvironmentFailedError(
            f"the server {task.server!r} answers in turns, and the row has tools",
            hint="Rows with tools need a server with /verify.",
        )
    first = [Message(role="user", content=beginning.observation)] if beginning.observation else []
    stop_reason = await take_turns(episode, [*messages, *first], server)
    episode.state[SCORE] = score_turns(episode)
    return stop_reason


def _tools(task: GymTask, server: GymServer, beginning: Beginning) -> list[GymTool]:
    definitions = task.tools()
    names = [str(definition["function"]["name"]) for definition in definitions]
    missing = [name for name in names if name not in beginning.tools]
    if missing and len(missing) < len(names):
        raise EnvironmentFailedError(
            f"the server {task.server!r} does not answer the tool {missing[0]!r} of the row",
            hint=f"It answers {', '.join(sorted(beginning.tools))}.",
        )
    return [GymTool(server, definition, is_answered=not missing) for definition in definitions]


@cache
def _tasks(path: Path) -> list[dict[str, JsonValue]]:
    return read_instances(path)


environment = NemoGym()
