"""Secrets reach the stage that they are for, and nothing that anyone may read."""

import json

import pytest

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.base.errors import (
    ConfigurationError,
    EnvironmentFailedError,
    SecretMissingError,
    SecretTooShortError,
)
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, SandboxSettings, SecretSource
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.secrets import HostSecrets
from rollout_service.episodes import Episode, Score
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.settings.pipeline import SecretsSettings
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import LocalConfig, make_provider

HOST = {"GRADER_KEY": "grader-47e1'x", "INIT_KEY": "init-93b2", "AGENT_KEY": "agent-5c0d", "OTHER": "other"}
ALLOWED = SecretsSettings(variables=["GRADER_KEY", "INIT_KEY", "AGENT_KEY", "UNSET"])
TABLE = """
name = "e"
image = "base"
prompt = "Do it."
tools = ["bash", "finish"]
[sandbox.secrets]
FOR_ALL = { variable = "AGENT_KEY" }
[init]
command = "bash /environment/init"
secrets = { FOR_INIT = { variable = "INIT_KEY" } }
[evaluate]
command = "bash /environment/evaluate"
secrets = { FOR_GRADER = { variable = "GRADER_KEY" } }
"""
INIT = """
sleep 600 >/dev/null 2>&1 &
printf '%s' "$FOR_INIT-$FOR_ALL-$FOR_GRADER" | sha256sum | cut -c-64 >init.txt
"""
EVALUATE = """
[ "$FOR_GRADER" = "grader-47e1'x" ] && [ "$FOR_ALL" = agent-5c0d ] && [ -z "$FOR_INIT" ] &&
  [ ! -e "$HOME/secrets.sh" ] && echo '{"reward": 1}' >"$ROLLOUT_RESULT"
"""
LOOK = """
echo "all=$FOR_ALL init=$FOR_INIT grader=$FOR_GRADER"
cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c '^FOR_INIT=\\|^FOR_GRADER='
grep -rlE 'init-93b2|grader-47e1' "$PWD" 2>/dev/null
"""


def spec_with(source, **more):
    return EnvironmentSpec(name="e", sandbox=SandboxSettings(secrets={"KEY": source}), **more)


def folder_of(path, evaluate=EVALUATE, table=TABLE):
    for name, text in {"environment.toml": table, "init": INIT, "evaluate": evaluate}.items():
        (path / name).write_text(text)
    return load_folder(path)


@pytest.fixture
async def sandboxes(tmp_path):
    provider = make_provider(LocalConfig(provider="local"), tmp_path / "state")
    yield SandboxSource(provider, secrets=HostSecrets(ALLOWED, HOST))
    await provider.close()


@pytest.mark.slow
async def test_each_stage_has_its_secrets_and_the_agent_those_of_the_sandbox_masked(sandboxes, tmp_path):
    (tmp_path / "e").mkdir()
    environment = folder_of(tmp_path / "e")
    policy = ScriptedPolicy([turn("", call("bash", command=LOOK)), turn("", call("finish", answer="x"))])

    played = await play(environment, {}, policy, sandboxes)

    assert (played.score.reward, played.stop_reason) == (1.0, StopReason.FINISHED)
    told = json.dumps([message.content for message in policy.messages])
    assert "all=*** init= grader=\\n0\\n" in told
    assert not any(value in told for value in HOST.values())


@pytest.mark.slow
async def test_what_a_verifier_printed_is_shown_without_its_secrets(sandboxes, tmp_path):
    (tmp_path / "e").mkdir()
    environment = folder_of(tmp_path / "e", 'echo "the key is $FOR_GRADER"; exit 3')
    policy = ScriptedPolicy([turn("", call("finish", answer="x"))])

    with pytest.raises(EnvironmentFailedError, match=r"the key is \*\*\*"):
        await play(environment, {}, policy, sandboxes)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SecretSource(variable="OTHER"), "may not have the variable OTHER"),
        (SecretSource(variable="UNSET"), "the variable UNSET is not set"),
        (SecretSource(file="grader.key"), "there is no folder for the file grader.key"),
    ],
)
def test_a_missing_source_is_named_with_the_environment_and_the_key(source, said):
    secrets = HostSecrets(ALLOWED, HOST)

    with pytest.raises(SecretMissingError, match=rf"environment 'e': \[sandbox\] secrets.KEY: .*{said}"):
        secrets.check(spec_with(source))


def test_what_environments_lack_is_known_at_the_start():
    secrets = HostSecrets(ALLOWED, HOST)
    secrets.note_lacking(
        [spec_with(SecretSource(variable="AGENT_KEY")), spec_with(SecretSource(variable="UNSET"))]
    )
    assert secrets.lacking == [
        "environment 'e': [sandbox] secrets.KEY: the variable UNSET is not set, as this node started"
    ]


def test_a_file_is_read_from_the_folder_alone_and_each_time(tmp_path):
    secrets, spec = (
        HostSecrets(SecretsSettings(folder=tmp_path), {}),
        spec_with(SecretSource(file="grader.key")),
    )
    with pytest.raises(SecretMissingError, match="is missing"):
        secrets.check(spec)

    (tmp_path / "grader.key").write_text("first-key\n")
    assert secrets.check(spec) == {"first-key"}
    (tmp_path / "grader.key").write_text("second-key\n")
    assert secrets.check(spec) == {"second-key"}
    for path in ("../grader.key", "/etc/passwd", ".."):
        with pytest.raises(ValueError, match="file"):
            SecretSource(file=path)


def test_secrets_of_the_evaluation_are_refused_in_the_agents_sandbox(tmp_path):
    with pytest.raises(ConfigurationError, match='need sandbox = "fresh"'):
        folder_of(tmp_path, table=TABLE + 'sandbox = "same"\n')
    with pytest.raises(ValueError, match="fresh sandbox"):
        EnvironmentSpec(
            name="e",
            evaluate_in=EvaluateIn.SAME,
            evaluate_secrets={"KEY": SecretSource(variable="GRADER_KEY")},
        )


def test_the_description_that_is_shown_has_no_secrets(tmp_path):
    shown = folder_of(tmp_path).spec.model_dump_json()

    assert "secrets" not in shown
    assert "_KEY" not in shown


class Telling(AgentEnvironment):
    """An environment that tells the policy and its graders what it should keep to itself."""

    async def run(self, episode: Episode) -> StopReason:
        said = [Message(role="user", content="use agent-5c0d")]
        await episode.policy.respond(said, max_tokens=9)
        episode.policy.replace(said)
        episode.answer, episode.grader_output = "agent-5c0d", "agent-5c0d"
        episode.notes.append("agent-5c0d")
        return StopReason.FINISHED

    async def evaluate(self, episode: Episode) -> Score:
        return Score(1.0, {f"with {episode.secrets['KEY']}": 1.0})


async def test_whatever_an_environment_tells_is_masked(sandboxes):
    secrets = SandboxSettings(secrets={"KEY": SecretSource(variable="AGENT_KEY")})
    spec = EnvironmentSpec(
        name="e",
        prompt="Do it.",
        sandbox=secrets,
        evaluate_secrets={"KEY": SecretSource(variable="GRADER_KEY")},
    )
    policy = ScriptedPolicy([turn("Yes.")])

    played = await play(Telling(spec), {}, policy, sandboxes)

    assert [message.content for message in policy.messages] == ["use ***"]
    episode = played.episode
    assert [episode.answer, episode.grader_output, *episode.notes] == ["***"] * 3
    assert played.score.parts == {"with ***": 1.0}
    assert episode.secrets == {}


def test_a_value_that_is_too_short_to_mask_is_refused():
    secrets = HostSecrets(ALLOWED, HOST | {"AGENT_KEY": "hunter2"})

    with pytest.raises(SecretTooShortError, match="a value of under 8 characters") as caught:
        secrets.check(spec_with(SecretSource(variable="AGENT_KEY")))

    assert "hunter2" not in str(caught.value) + caught.value.hint
