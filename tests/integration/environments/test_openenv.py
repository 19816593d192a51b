"""With real servers of OpenEnv, rewards are those that its own client sees, and a server that fails is a failure."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.bridges.openenv import OpenEnv, load_openenv
from rollout_service.environments.bridges.openenv_session import OpenEnvServer, OpenEnvServerError
from rollout_service.episodes import PolicyTurn
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import Trial, play
from rollout_service.testing.scripted_policy import ScriptedPolicy, ScriptedTurn, call, malformed_call, turn
from tests.support.openenv.process import RealOpenEnv
from tests.support.processes.relay import relay_to

pytestmark = [pytest.mark.bridges, pytest.mark.xdist_group("openenv")]
TALK = 'text_field = "message"\n'
GUESS = 'observation_field = "text"\nsessions = 4\n'


def declared(folder: Path, url: str, more: str = "") -> OpenEnv:
    (folder / "environment.toml").write_text(f'kind = "openenv"\nname = "served"\nurl = "{url}"\n{more}')
    return load_openenv(folder)


def guesses(*numbers: object) -> list[ScriptedTurn]:
    return [turn("", call("act", number=number)) for number in numbers]


async def until_free(url: str) -> None:
    """Wait until a server with one session has it free."""
    with anyio.fail_after(30):
        while True:
            try:
                async with OpenEnvServer(url, {}).session() as session:
                    await session.reset({}, 30)
                    return
            except OpenEnvServerError:
                await anyio.sleep(0.05)


async def talk(
    real: RealOpenEnv,
    folder: Path,
    sandboxes: SandboxSource,
    says: Sequence[ScriptedTurn],
    instance: dict[str, JsonValue] | None = None,
    more: str = TALK,
) -> Trial:
    return await play(declared(folder, f"{real.url}/talk", more), instance or {}, ScriptedPolicy(says), sandboxes)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_calls_of_the_tool_get_the_rewards_of_openenvs_own_client(real, tmp_path, sandboxes, seed):
    numbers = [4, 2, 6, 1, 3]
    expected = real.play(f"{real.url}/guess", {"seed": seed, "most": 8}, *({"number": number} for number in numbers))
    policy = ScriptedPolicy(guesses(*numbers))
    instance: dict[str, JsonValue] = {"seed": seed, "options": {"most": 8}}
    trial = await play(declared(tmp_path, f"{real.url}/guess", GUESS), instance, policy, sandboxes)
    assert expected["done"]
    assert trial.stop_reason is StopReason.FINISHED
    assert trial.score.reward == sum(reward or 0.0 for reward in expected["rewards"])
    assert trial.score.parts["turns"] == len(expected["rewards"])
    assert trial.score.parts["finished"] == 1.0
    seen = [message.content for message in policy.messages if message.role in ("user", "tool")]
    assert seen == [one["text"] for one in (expected["first"], *expected["observations"][:-1])]


async def test_the_tool_has_the_schema_of_an_action(real, tmp_path, sandboxes):
    policy = ScriptedPolicy(["I give up."])
    trial = await play(declared(tmp_path, f"{real.url}/guess/", 'tool = "guess"'), {"seed": 1}, policy, sandboxes)
    (tool,) = policy.tools
    assert tool["function"]["name"] == "guess"
    assert tool["function"]["description"] == "Guess the number."
    parameters = tool["function"]["parameters"]
    assert set(parameters["properties"]) == {"number"}
    assert parameters["required"] == ["number"]
    assert trial.score.parts == {"turns": 0.0, "finished": 0.0}


async def test_texts_get_the_rewards_of_openenvs_own_client(real, tmp_path, sandboxes):
    says = ["please", "no", "please no please", "never said"]
    expected = real.play(f"{real.url}/talk", {}, *({"message": text} for text in says))
    await until_free(f"{real.url}/talk")
    trial = await talk(real, tmp_path, sandboxes, says, more=TALK + 'system = "Be kind."\nprompt = "Speak."\n')
    assert trial.score.reward == sum(expected["rewards"]) == 1.25
    assert trial.score.parts["turn_2"] == -0.5
    system, first, *_ = trial.episode.policy.messages
    assert system.content == "Be kind."
    assert first.content == 'Speak.\n\n{"words":[],"left":3}'
    assert trial.episode.policy.messages[3].content == '{"words":["please"],"left":2}'


async def test_an_action_that_is_not_valid_is_explained_and_the_episode_goes_on(real, tmp_path, sandboxes):
    policy = ScriptedPolicy(
        [
            turn("", call("act", number="many")),
            turn("", call("act", nombre=3)),
            turn("", malformed_call()),
            *guesses(1, 1, 1, 1, 1),
        ]
    )
    instance: dict[str, JsonValue] = {"seed": 1, "options": {"most": 8}}
    trial = await play(declared(tmp_path, f"{real.url}/guess", GUESS), instance, policy, sandboxes)
    said = [message.content for message in policy.messages if message.role == "tool"]
    assert "number: Input should be a valid integer" in said[0]
    assert "number: Field required" in said[1]
    assert "nombre: Extra inputs are not permitted" in said[1]
    assert trial.score.parts["invalid_actions"] == 2.0
    assert trial.score.parts["finished"] == 1.0
    assert trial.score.reward == 0.0


async def test_a_session_survives_a_policy_that_thinks_longer_than_the_server_waits_for_pings(
    real, tmp_path, sandboxes
):
    environment = declared(tmp_path, f"{real.url}/talk", TALK)
    policy = ScriptedPolicy(["please", "please", "please"], delay=1.5)
    assert (await play(environment, {}, policy, sandboxes)).score.reward == 2.25


async def test_rollouts_wait_for_each_other_where_the_server_has_one_session(real, tmp_path, sandboxes):
    environment = declared(tmp_path, f"{real.url}/talk", TALK)
    rewards: list[float] = []

    async def one() -> None:
        trial = await play(environment, {}, ScriptedPolicy(["please"] * 3, delay=0.05), sandboxes)
        rewards.append(trial.score.reward)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(one)
    assert rewards == [2.25] * 3


async def test_a_server_without_a_free_session_is_an_error_that_may_pass(real, tmp_path, sandboxes):
    async with OpenEnvServer(f"{real.url}/talk", {}).session() as session:
        await session.reset({}, 30)
        with pytest.raises(OpenEnvServerError, match="has no free session") as caught:
            await talk(real, tmp_path, sandboxes, ["please"])
    assert caught.value.retryable
    assert (await talk(real, tmp_path, sandboxes, ["please"] * 3)).score.reward == 2.25


async def test_a_cancelled_rollout_leaves_no_session(real, tmp_path, sandboxes):
    with anyio.CancelScope() as scope:

        def cancel(_: object) -> str:
            scope.cancel()
            return "please"

        await talk(real, tmp_path, sandboxes, [cancel, "please"])
    assert scope.cancelled_caught
    assert (await talk(real, tmp_path, sandboxes, ["no"] * 3)).score.reward == -1.5


@pytest.mark.parametrize(
    ("says", "instance", "more", "why"),
    [
        (["crash"], {}, "", r"EXECUTION_ERROR.*the talk broke down"),
        (["hang"], {}, "[limits]\ntool_seconds = 0.2", "no answer to a step within 0.2 s"),
        (["mute", "mute", "mute"], {}, "", "no observation had a reward"),
        (["please"], {"options": {"turns": "many"}}, "", "refused to reset: left: Input should be"),
        (["please"], {}, 'observation_field = "word"', "no field 'word'"),
    ],
)
async def test_an_environment_that_fails_is_never_a_reward(real, tmp_path, sandboxes, says, instance, more, why):
    with pytest.raises(EnvironmentFailedError, match=why) as caught:
        await talk(real, tmp_path, sandboxes, says, instance, TALK + more)
    assert caught.value.hint
    await until_free(f"{real.url}/talk")


async def test_an_episode_that_is_over_at_its_reset_is_a_failure(real, tmp_path, sandboxes):
    environment = declared(tmp_path, f"{real.url}/guess", GUESS)
    with pytest.raises(EnvironmentFailedError, match="over at its reset"):
        await play(environment, {"options": {"most": 0}}, ScriptedPolicy([]), sandboxes)


OBSERVATION: dict[str, Any] = {"observation": {}, "reward": 0.0, "done": False}


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"say": "no JSON"}, EnvironmentFailedError, "something else than an observation"),
        ({"say": "[]"}, EnvironmentFailedError, "something else"),
        ({"say": json.dumps({"type": "state", "data": OBSERVATION})}, EnvironmentFailedError, "another type"),
        (
            {"say": json.dumps({"type": "observation", "data": OBSERVATION | {"reward": "1"}})},
            EnvironmentFailedError,
            "not a finite number",
        ),
        ({"say": json.dumps({"type": "error", "data": None})}, EnvironmentFailedError, "something else"),
        ({"say": " " * 5_000_000}, OpenEnvServerError, "close code 1009"),
        ({"leave": True}, OpenEnvServerError, "ended the session"),
    ],
)
async def test_what_is_no_server_of_openenv_is_an_error(real, tmp_path, sandboxes, options, error, why):
    environment = declared(tmp_path, f"{real.url}/rude", TALK)
    with pytest.raises(error, match=why):
        await play(environment, {"options": options}, ScriptedPolicy(["x"]), sandboxes)


async def test_a_schema_that_is_none_is_an_error(real):
    with pytest.raises(EnvironmentFailedError, match="no schema of an action"):
        await OpenEnvServer(f"{real.url}/rude", {}).action_schema()


async def test_redirects_are_not_followed(real):
    server = OpenEnvServer(f"{real.url}/moved", {})
    with pytest.raises(OpenEnvServerError, match="redirects"):
        await server.action_schema()
    with pytest.raises(OpenEnvServerError, match="cannot be reached"):
        async with server.session():
            pass


async def test_a_lost_server_is_an_error_that_may_pass(real, tmp_path, sandboxes):
    async with relay_to(real.url) as relay:
        environment = declared(tmp_path, f"{relay.url}/guess", GUESS)

        def lose(_: object) -> PolicyTurn:
            relay.cut()
            return turn("", call("act", number=1))

        with pytest.raises(OpenEnvServerError, match="ended the session without an answer to a step"):
            await play(environment, {}, ScriptedPolicy([lose]), sandboxes)
        with pytest.raises(OpenEnvServerError, match="cannot be reached") as caught:
            await play(environment, {}, ScriptedPolicy([lose]), sandboxes)
        assert caught.value.retryable
