"""An environment that asks other models is audited, attacked and checked with those that the options name."""

import json
from importlib import import_module

import pytest
from typer.testing import CliRunner

from api_schemas.trajectories import Message
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.cli import app, common
from rollout_service.cli.common import CommandError
from rollout_service.cli.env.engines import PoolModels
from rollout_service.cli.server_child import running_server
from rollout_service.environments.builtin.split import environment as split
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import OtherModels, play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import LocalConfig, make_provider
from tests.support import samples
from tests.support.browser import canned

PARTNER = """\
from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.episodes import Score
from rollout_service.judging.rubric import Rubric, RubricSettings

RUBRIC = Rubric(RubricSettings(name="number", template="Is it the number {{ instance.number }}?"))


class Guess(Environment):
    spec = EnvironmentSpec(name="guess")
    has_solution = True

    def dataset(self):
        return [{"number": 7}]

    async def ask(self, episode):
        asked = [Message(role="user", content="Which number?")]
        said = await episode.require_sampler().sample("partner", asked, max_tokens=64, temperature=0.0)
        return said.text

    async def run(self, episode):
        told = Message(role="user", content=await self.ask(episode))
        episode.answer = (await episode.policy.respond([told], max_tokens=64)).message.content
        return StopReason.FINISHED

    async def solve(self, episode):
        episode.answer = await self.ask(episode)
        return StopReason.FINISHED

    async def evaluate(self, episode):
        if not episode.answer.isdecimal():
            return Score(0.0)
        return Score((await episode.require_judge().ask(RUBRIC, episode.instance, answer=episode.answer)).value)
"""


@pytest.fixture
def guess(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SANDBOX__PROVIDER", "local")
    (tmp_path / "guess.py").write_text(PARTNER)
    (tmp_path / "partner.jsonl").write_text('{"content": "7"}\n')
    (tmp_path / "judge.jsonl").write_text('{"content": "VERDICT: correct"}\n')
    return tmp_path


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["env", *map(str, arguments)])


def report_of(result):
    return json.loads(result.stdout[result.stdout.index("{") :])  # after a warning that nothing is isolated


def scripts(folder) -> list[str]:
    return [part for pool in ("partner", "judge") for part in ("--pool-script", f"{pool}={folder}/{pool}.jsonl")]


@pytest.mark.slow
def test_an_environment_with_scripted_models_is_audited_attacked_and_checked(guess):
    audit = invoke("audit", guess / "guess.py", "--json", *scripts(guess))
    assert audit.exit_code == 0, audit.output
    assert report_of(audit)["good"] == [0]
    attack = invoke("attack", guess / "guess.py", "--only", "idle", *scripts(guess))
    assert "1 attack, 0 broken" in attack.output
    check = invoke("check", guess / "guess.py", "--run", "--json", *scripts(guess))
    assert report_of(check)["tried"][0]["solved"] == 1.0


@pytest.mark.slow
def test_a_pool_without_a_model_is_named_with_the_options(guess):
    [partner, *_] = zip(*[iter(scripts(guess))] * 2, strict=True)
    audit = invoke("audit", guess / "guess.py", "--runs", 1, *partner)
    assert "the environment asks the model of the pool 'judge', and nothing answers for it here" in audit.output
    assert "Add --pool-model judge=MODEL, --pool-script judge=FILE" in audit.output


@pytest.mark.slow
async def test_a_model_of_another_pool_is_served_by_an_embedded_engine_and_a_script_says_that_it_is_one(guess):
    async with PoolModels.read(["partner=calc-tuned"], [f"judge={guess}/judge.jsonl"]).opened(guess) as models:
        assert models.sampler.model("partner").endswith("calc-tuned@0")
        assert models.sampler.model("judge") == "script judge.jsonl@0"


def test_two_options_for_one_pool_are_refused():
    with pytest.raises(CommandError, match="both name the pool 'judge'"):
        PoolModels.read(["judge=calc-base"], ["judge=judge.jsonl"])


def test_pools_of_another_server_cannot_be_named(guess):
    run = invoke("run", guess / "guess.py", "--url", "http://127.0.0.1:9", *scripts(guess))
    assert run.exit_code == 1
    assert "with --url the engines of that server answer for all pools" in run.output


@pytest.mark.slow(seconds=10)
async def test_the_engines_of_a_server_answer_for_its_pools(guess):
    own = PoolModels.read(None, [f"partner={guess}/partner.jsonl"])
    async with (
        own.engines() as [engine],
        running_server(guess / "server", ["--backend", str(engine.url)]) as client,
        PoolModels.read(None, None, client.base_url).opened(guess) as models,
    ):
        asked = [Message(role="user", content="Which number?")]
        assert (await models.sampler.sample("policy", asked, max_tokens=8, temperature=0.0)).text == "7"


def test_sub_agents_without_a_pool_are_refused_with_the_options():
    run = invoke("run", "split")
    assert "the sub-agents of split need the pool 'frozen-1'" in run.output
    assert "add --pool-model POOL=MODEL" in run.output


@pytest.mark.slow(seconds=20)
def test_a_rollout_on_a_server_of_its_own_has_the_pools_that_are_named(guess):
    script = ["--script", guess / "partner.jsonl", "--json"]
    [partner, *_] = zip(*[iter(scripts(guess))] * 2, strict=True)
    run = invoke("run", guess / "guess.py", *script, *scripts(guess))
    assert report_of(run)["reward"] == 1.0, run.output
    without_judge = invoke("run", guess / "guess.py", *script, *partner)
    assert without_judge.exit_code == 1
    assert "add --pool-model POOL=MODEL or --pool-script POOL=FILE" in without_judge.stderr


@pytest.mark.slow
def test_an_idle_agent_with_sub_agents_is_audited(guess):
    assert "1 of 1 instance without findings" in invoke("audit", "split", "--instances", 1, "--runs", 1).output


@pytest.mark.slow
async def test_sub_agents_are_sampled_from_the_pool_that_is_named(tmp_path):
    (tmp_path / "worker.jsonl").write_text(
        '{"tool_calls": [{"name": "read", "arguments": {"key": "a"}}]}\n{"content": "<result>7</result>"}\n'
    )
    create = call("create_subagent", name="a", system_prompt="Look it up.")
    script = [turn("", create, call("assign_task", agent="a", prompt="a")), "7"]

    async def outcome(scripts: list[str]) -> str:
        provider = make_provider(LocalConfig(provider="local"), tmp_path)
        policy, sandboxes = ScriptedPolicy(script), SandboxSource(provider)
        try:
            async with PoolModels.read(None, scripts).opened(tmp_path) as models:
                try:
                    await play(split, split.dataset()[0], policy, sandboxes, OtherModels(policies=models.policies))
                except EnvironmentFailedError as error:
                    return error.hint
        finally:
            await provider.close()
        return policy.messages[-2].content

    assert "7" in await outcome([f"frozen-1={tmp_path}/worker.jsonl"])
    assert "Add --pool-model frozen-1=MODEL" in await outcome([])


async def test_a_rollout_is_shown_with_the_tokenizer_of_its_own_pool(monkeypatch, capsys):
    rollout, run = samples.rollout(), import_module("rollout_service.cli.env.run")  # not the command
    pools = ("judge", "policy")
    views = [canned.backend(1, pool=pool).backend.model_copy(update={"tokenizer_path": pool}) for pool in pools]

    class Server:
        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

        async def run(self, request):
            return rollout

        async def backends(self):
            return views

    monkeypatch.setattr(common, "connect", lambda url, key: Server())
    monkeypatch.setattr(run, "load_tokenizer", lambda path, **_: path)
    monkeypatch.setattr(run, "render_rollout", lambda rollout, tokenizer, **_: f"as {tokenizer} reads it")
    own = run.OwnServer("calc", None, None, None, None, PoolModels.read(None, None))
    for read in ("as policy reads it", rollout.rollout_id):
        await run.run_one(own, 0, "{}", "http://server", None, as_json=False)
        assert read in capsys.readouterr().out
        del views[1:]  # the only engine has left meanwhile
