"""Environments work without Python, and no agent can score itself."""

import json
import os
import signal
from pathlib import Path

import pytest

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.declarative.environment import load_folder, parse_score
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes.sessions.serial_session import open_sessions
from tests.support.episodes import episode_of

pytestmark = pytest.mark.slow
WORDCOUNT = Path(__file__).parents[3] / "examples" / "environments" / "wordcount"


def environment(folder, evaluate, init=None, sandbox="same", tools=("bash", "finish"), keys="", **files):
    folder.mkdir(exist_ok=True)
    table = f'name = "e"\nimage = "base"\nprompt = "Do it."\ntools = {json.dumps(tools)}\n[evaluate]\n'
    table += f'command = "bash /environment/evaluate"\nsandbox = "{sandbox}"\n{keys}'
    if init is not None:
        table += '[init]\ncommand = "bash /environment/init"\n'
    for name, text in {"evaluate": evaluate, "init": init, "environment.toml": table, **files}.items():
        if text is not None:
            (folder / name).write_text(text)
    return load_folder(folder)


def bash(command):
    return turn("", call("bash", command=command))


async def run(env, sandboxes, *commands, instance=None):
    policy = ScriptedPolicy([*(bash(command) for command in commands), turn("", call("finish", answer="done"))])
    return await play(env, instance or {"secret": "s3cr3t"}, policy, sandboxes)


@pytest.mark.parametrize(("number", "reward"), [("3", 1.0), ("2", 0.5), ("9", 0.0), ("many", 0.0)])
async def test_the_example_of_the_documentation(sandboxes, number, reward):
    env = load_folder(WORDCOUNT)
    instance = env.dataset()[0]
    trial = await run(env, sandboxes, "cat text.txt", f"echo {number} > count.txt", instance=instance)
    assert trial.stop_reason is StopReason.FINISHED
    assert trial.score.reward == reward
    assert trial.score.parts == {"answered": float(number != "many")}
    assert "the sea is calm" in trial.episode.policy.messages[3].content


async def test_the_solution_of_the_example_solves_its_first_task(sandboxes):
    turns = [json.loads(line) for line in (WORDCOUNT / "solution.jsonl").read_text().splitlines()]
    calls = [[call(each["name"], **each["arguments"]) for each in one["tool_calls"]] for one in turns]
    env = load_folder(WORDCOUNT)
    policy = ScriptedPolicy([turn("", *each) for each in calls])
    trial = await play(env, env.dataset()[0], policy, sandboxes)
    assert (trial.stop_reason, trial.score.reward) == (StopReason.FINISHED, 1.0)


async def test_commands_are_told_where_everything_is(tmp_path, sandboxes):
    evaluate = """
        set -e
        test -f "$ROLLOUT_ENVIRONMENT/evaluate" && test "$(cat "$ROLLOUT_ANSWER")" = done
        grep -q s3cr3t "$ROLLOUT_INSTANCE" && test "$(cat "$ROLLOUT_WORKDIR/made")" = by-agent
        echo '{"reward": 0.25, "parts": {"a": 1}}' > "$ROLLOUT_RESULT"
    """
    trial = await run(environment(tmp_path / "e", evaluate), sandboxes, "echo by-agent > made")
    assert (trial.score.reward, trial.score.parts) == (0.25, {"a": 1.0})


@pytest.mark.parametrize("sandbox", ["same", "fresh"])
async def test_the_agent_sees_nothing_of_the_grader_or_the_instance(tmp_path, sandboxes, sandbox):
    evaluate = 'echo "{\\"reward\\": 1}" > "$ROLLOUT_RESULT"  # grader'
    env = environment(tmp_path / "e", evaluate, init="echo prepared > ready", sandbox=sandbox)
    look = "cat ready; grep -rs -e s3cr3t -e 'reward' . /proc/self/environ; ls -A; env | grep ROLLOUT"
    trial = await run(env, sandboxes, look)
    said = trial.episode.policy.messages[2].content
    assert said.startswith("prepared\nready")
    assert "s3cr3t" not in said
    assert ".rollout-" not in said
    assert trial.score.reward == 1.0


SERVES = "(while sleep 0.05; do cp asked answered; done) > /dev/null 2>&1 &"
"""A server of one file."""
ASKS = """
    echo "$RANDOM" > "$ROLLOUT_WORKDIR/asked"
    for try in $(seq 40); do
        cmp "$ROLLOUT_WORKDIR/asked" "$ROLLOUT_WORKDIR/answered" && answered=1 && break
        sleep 0.05
    done
    echo "{\\"reward\\": ${answered-0}}" > "$ROLLOUT_RESULT"
"""


async def test_a_server_that_the_agent_left_answers_a_grader_that_keeps_it(tmp_path, sandboxes):
    env = environment(tmp_path / "e", ASKS, keys='agent_processes = "keep"\n')
    trial = await run(env, sandboxes, SERVES)
    assert (trial.score.reward, trial.episode.notes) == (1.0, [])


@pytest.mark.parametrize("sandbox", ["same", "fresh"])
async def test_a_server_that_was_ended_before_the_grading_is_named_if_it_may_have_cost_reward(
    tmp_path, sandboxes, sandbox
):
    env = environment(tmp_path / "e", ASKS, sandbox=sandbox)
    # Until it has become sleep, it is a bash too.
    sleeps = "sleep 345 > /dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done"
    trial = await run(env, sandboxes, SERVES, sleeps)
    [note] = trial.episode.notes
    assert (trial.score.reward, "sleep 345" in note, "`agent_processes`" in note) == (0.0, True, True)
    assert "--noprofile" not in note, note
    assert "before the grading: bash, " in note or ", bash" in note


async def test_an_agent_that_ends_the_sandbox_whose_processes_are_kept_gets_nothing(tmp_path, sandboxes):
    env = environment(tmp_path / "e", ASKS, keys='agent_processes = "keep"\n')

    class Closing(ScriptedPolicy):
        """Ends the sandbox after the last turn, as an agent with the rights for it would."""

        async def respond(self, new_messages, *, max_tokens):
            answer = await super().respond(new_messages, max_tokens=max_tokens)
            if "over" in answer.message.content:
                [info] = sandboxes.live()
                os.kill(info.pid, signal.SIGKILL)
            return answer

    trial = await play(env, {}, Closing([bash("true"), "It is over."]), sandboxes)
    assert trial.score.parts == {"sandbox_ended": 1.0}
    assert "none of the agent's work is left" in trial.episode.notes[0]


async def test_a_process_that_waits_for_the_grader_is_ended_before_it(tmp_path, sandboxes):
    # It would overwrite every result that appears below the working folder.
    lurk = """
        bash -c 'while :; do for f in .rollout-*/; do echo "{\\"reward\\": 1}" > $f/result.json; done; done' \
            > /dev/null 2>&1 &
        sleep 300 > /dev/null 2>&1 & echo $! > pid
    """
    evaluate = """
        sleep 0.3
        readlink "/proc/$(cat "$ROLLOUT_WORKDIR/pid")/exe" && exit 3
        test -e "$ROLLOUT_RESULT" && exit 4
        echo '{"reward": 0.0}' > "$ROLLOUT_RESULT"
    """
    trial = await run(environment(tmp_path / "e", evaluate), sandboxes, lurk)
    assert trial.score.reward == 0.0


async def test_results_and_graders_that_the_agent_left_count_for_nothing(tmp_path, sandboxes):
    forge = """
        mkdir -p environment; echo 'echo "{\\"reward\\": 1}" > $ROLLOUT_RESULT' > environment/evaluate
        echo '{"reward": 1}' > result.json; echo 'raise SystemExit(0)' > json.py
        export ROLLOUT_RESULT=$PWD/result.json
    """
    evaluate = """python3 -c '
import json, os
open(os.environ["ROLLOUT_RESULT"], "w").write(json.dumps({"reward": 0.0}))'"""
    trial = await run(environment(tmp_path / "e", evaluate), sandboxes, forge)
    assert trial.score.reward == 0.0


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        ("echo broken >&2; exit 2", "exit code 2: broken"),
        ("true", "left no result.*it printed nothing"),
        ('echo "{\\"reward\\": 1.0}"', 'left no result.*it printed: {"reward": 1.0}'),
        (
            "echo nonsense; touch $ROLLOUT_RESULT",
            "no usable result: the file: Invalid JSON.*it printed: nonsense",
        ),
        ("head -c 100000 /dev/zero > $ROLLOUT_RESULT", "left no result"),
        ("mkdir $ROLLOUT_RESULT", "left no result"),
        ("echo '{\"reward\": NaN}' > $ROLLOUT_RESULT", "finite"),
        ('printf \'{"reward": "1"}\' > $ROLLOUT_RESULT', """valid number; it wrote '{"reward": "1"}'; it printed"""),
    ],
)
async def test_a_failed_grader_is_not_a_zero(tmp_path, sandboxes, evaluate, message):
    with pytest.raises(EnvironmentFailedError, match=message) as caught:
        await run(environment(tmp_path / "e", evaluate), sandboxes)
    assert caught.value.hint
    assert ("env shell DIR --stage evaluate" in caught.value.hint) == ("exit code" in message)
    assert "env run" not in caught.value.hint, "which may be what failed"


async def test_sessions_are_in_the_working_folder_that_init_made(tmp_path, sandboxes):
    init = 'here=$PWD; cd ..; rm -rf "$here"; mkdir "$here"; echo new > "$here/made"'
    env = environment(tmp_path / "e", "true", init, tools=["bash", "python"])
    policy = ScriptedPolicy([bash("cat made"), turn("", call("python", code="print(open('made').read())")), "."])
    async with await sandboxes.start(env.spec, "e") as sandbox:
        await open_sessions(sandbox, env.spec.sessions)
        episode = episode_of(env, {}, policy=policy, sandbox=sandbox)
        await env.init(episode)
        await env.run(episode)
    told = [message.content.strip() for message in policy.messages if message.role == "tool"]
    assert told == ["new", "new"]


async def test_an_init_that_removes_the_working_folder_is_reported(tmp_path, sandboxes):
    env = environment(tmp_path / "e", "true", 'here=$PWD; cd ..; rm -rf "$here"')
    with pytest.raises(EnvironmentFailedError, match="left no working folder"):
        await run(env, sandboxes, "true")


async def test_an_init_that_fails_says_what_it_printed(tmp_path, sandboxes):
    with pytest.raises(EnvironmentFailedError, match=r"init command .* exit code 1: no such wine"):
        await run(environment(tmp_path / "e", "true", init="echo no such wine; false"), sandboxes)


@pytest.mark.parametrize(
    "data",
    [
        "",
        "[]",
        "{}",
        '{"reward": true}',
        '{"reward": "1"}',
        '{"reward": null}',
        '{"reward": Infinity}',
        '{"reward": 1e999}',
        '{"reward": 1, "parts": [1]}',
        '{"reward": 1, "parts": {"a": NaN}}',
        '{"reward": 1, "extra": 2}',
        "[" * 100_000,
        '{"reward": ' + "9" * 5_000 + "}",
    ],
)
def test_a_result_that_is_not_a_score_is_refused(data):
    with pytest.raises(EnvironmentFailedError, match="no usable result"):
        parse_score(data.encode())


def test_a_valid_score_is_accepted():
    assert parse_score(b'{"reward": 1}').reward == 1.0
    assert parse_score(json.dumps({"reward": -0.5, "parts": {"a": 2}}).encode()).parts == {"a": 2.0}
