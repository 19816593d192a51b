"""Secrets reach only the steps that name them, and are masked in everything that is kept."""

import json
import logging
import subprocess

import pytest
import structlog

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.base.errors import (
    ConfigurationError,
    EnvironmentFailedError,
    SecretMissingError,
    SecretTooShortError,
)
from rollout_service.base.masking import mask, mask_error, mask_texts, spellings
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, SandboxSettings, SecretSource
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.secrets import HostSecrets
from rollout_service.episodes import Episode, Score
from rollout_service.observability.telemetry.logging import hidden_in_log
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.settings import LogFormat
from rollout_service.settings.pipeline import SecretsSettings
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from tests.support.logging_of_service import logged

# One test looks for the variables of the others among all processes of the host.
pytestmark = pytest.mark.xdist_group("environment secrets")

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
def sandboxes(provider):
    return SandboxSource(provider, secrets=HostSecrets(ALLOWED, HOST))


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
    secrets.note_lacking([spec_with(SecretSource(variable="AGENT_KEY")), spec_with(SecretSource(variable="UNSET"))])
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


QUOTED = "a'b\"c$d\\e`f-1234"
LINES = "-----BEGIN-----\nMIIBVgIBADANBgk\n  qhkiG9w0BAQEFAAS\n}"


@pytest.mark.parametrize("value", [QUOTED, LINES, "schlüssel-1234"])
@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("command", ["export -p", "env", "set", 'set -x; true "$KEY"'])
def test_what_a_shell_prints_of_its_variables_is_masked(value, shell, command):
    environ = {"KEY": value, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([shell, "-c", command], capture_output=True, env=environ, text=True, check=True)

    shown = mask(done.stdout + done.stderr, spellings(value))

    assert "***" in shown
    assert not [part for part in ("1234", "MIIBV", "qhkiG") if part in shown], shown


@pytest.mark.parametrize("written", [repr, json.dumps, lambda text: json.dumps(text, ensure_ascii=False)])
def test_json_and_python_spell_it_so_too(written):
    for value in (QUOTED, LINES):
        assert mask(written(value), spellings(value)) == f"{written(value)[0]}***{written(value)[0]}"


def test_lines_of_a_secret_that_others_have_too_are_left_alone():
    text = "-----BEGIN-----, } and MIIBVgIBADANBgk"

    assert mask(text, spellings(LINES)) == "-----BEGIN-----, } and ***"


def test_of_values_that_contain_each_other_nothing_is_left():
    assert mask("key-long key", ["key", "key-long"]) == "*** ***"


def test_data_is_masked_in_all_its_texts_and_otherwise_as_it_was():
    data = {"a 12345": ["12345", ("12345", 12345)], "n": None, "b": b"12345"}

    assert mask_texts(data, ["12345"]) == {"a ***": ["***", ("***", 12345)], "n": None, "b": b"***"}
    assert mask_texts(data, ()) is data


def test_an_error_its_causes_and_those_in_a_group_are_masked():
    error = EnvironmentFailedError("cannot use 12345", hint="Change 12345.", context={"keys": ["12345"]})
    error.__cause__ = ValueError("bad key 12345")
    group = ExceptionGroup("several", [error])

    mask_error(group, {"12345"})

    assert (str(error), error.hint, str(error.__cause__)) == ("cannot use ***", "Change ***.", "bad key ***")
    assert error.context == {"keys": ["***"]}


@pytest.mark.parametrize("log_format", LogFormat)
def test_the_log_has_no_secret_in_events_tracebacks_and_lines_of_libraries(log_format):
    with logged(log_format) as written:
        with hidden_in_log(spellings(QUOTED)):
            structlog.get_logger("x").warning("failed", output=QUOTED, detail={"list": [QUOTED]})
            logging.getLogger("library").info("with %s", QUOTED)
            structlog.get_logger("x").error("raised", exc_info=ValueError(QUOTED))
        structlog.get_logger("x").warning("later", output="unmasked-1234")
    *masked, last = written.getvalue().rstrip().splitlines()
    assert "1234" not in "".join(masked)
    assert "".join(masked).count("***") == 4
    assert "unmasked-1234" in last
