"""A report says what probably let attacks succeed, so that one mend can hold them all."""

import io
from typing import NoReturn

from rich.console import Console

from api_schemas.rollouts import StopReason
from rollout_service.authoring.attacks import (
    SCRIPTS,
    Attack,
    AttackOutcome,
    AttackReport,
    AttackVerdict,
    attack_environment,
)
from rollout_service.authoring.attacks.scripts import CAUSES
from rollout_service.cli.env.attack import show
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.episodes import Episode, Score
from sandboxes import Sandbox
from sandboxes.errors import SandboxStartError
from sandboxes.providers.local import LocalSandbox

FORGED, NULLED = AttackVerdict.FORGED, AttackVerdict.NULLED


def report(*outcomes: tuple[str, AttackVerdict, str]) -> AttackReport:
    made = (
        AttackOutcome(name, "does it", verdict, 1.0 if verdict is FORGED else None, detail, 0.1)
        for name, verdict, detail in outcomes
    )
    return AttackReport("e", EvaluateIn.SAME, 0.0, tuple(made))


def test_every_attack_has_a_cause():
    assert set(CAUSES) == {attack.name for attack in SCRIPTS} - {"idle"}


def test_attacks_with_one_cause_are_shown_together():
    found = report(
        ("idle", AttackVerdict.HELD, ""),
        ("site-in-workdir", FORGED, ""),
        ("early-results", FORGED, ""),
        ("conftest", FORGED, ""),
        ("sparse-file", NULLED, "sandbox_file_error: '/w/huge' is too large"),
        ("full-disk", NULLED, "sandbox_file_error: '/w/fill' is too large"),
        ("daemon", AttackVerdict.NOT_PROMISED, ""),
    )
    assert list(found.causes.values()) == [
        ["site-in-workdir", "conftest"],
        ["early-results"],
        ["sparse-file", "full-disk"],
    ]
    assert found.as_dict()["causes"] == found.causes
    out = io.StringIO()
    show(found, Console(file=out, width=200))
    assert "folders that the agent can write to (2 attacks): site-in-workdir, conftest\n" in out.getvalue()
    assert "there is no reward: sandbox_file_error (2 attacks): sparse-file, full-disk\n" in out.getvalue()
    assert "5 broken" in out.getvalue()


class InSteps(Environment):
    """A task of two steps; its reward is the size of a file."""

    spec = EnvironmentSpec(name="in-steps", image="base")

    async def run(self, episode: Episode) -> StopReason:
        sandbox = episode.require_sandbox()
        await sandbox.write_file("made", b"")
        for _ in range(2):
            await episode.policy.respond([], max_tokens=8)
        episode.answer = (await sandbox.read_file("made")).decode()
        return StopReason.FINISHED

    async def evaluate(self, episode: Episode) -> Score:
        return Score(float(len(episode.answer)))


async def test_a_task_of_several_steps_is_attacked_once(sandboxes):
    attacks = [Attack("idle", "does nothing", ":"), Attack("grow", "makes a file longer", "echo -n x >>made")]
    found = await attack_environment(InSteps(), sandboxes, instance={}, attacks=attacks)
    assert [(one.verdict, one.reward) for one in found.outcomes] == [(AttackVerdict.HELD, 0.0), (FORGED, 1.0)]


async def test_an_attack_that_could_not_begin_was_not_held(sandboxes, monkeypatch):
    async def fails(sandbox: Sandbox) -> NoReturn:
        raise SandboxStartError("the shell did not start")

    monkeypatch.setattr(LocalSandbox, "bash", fails)
    found = await attack_environment(InSteps(), sandboxes, instance={}, attacks=[Attack("grow", "", "true")])
    assert [one.verdict for one in found.outcomes] == [NULLED]
