"""A report says what probably let attacks succeed, so that one mend can hold them all."""

import io

from rich.console import Console

from rollout_service.authoring.attacks import SCRIPTS, AttackOutcome, AttackReport, AttackVerdict
from rollout_service.authoring.attacks.scripts import CAUSES
from rollout_service.cli.env.attack import show
from rollout_service.environments.contract import EvaluateIn

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
