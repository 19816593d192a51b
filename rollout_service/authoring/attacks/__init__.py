"""Reward hacks against an environment's grading, run in real sandboxes: `rollout-service env attack`."""

from rollout_service.authoring.attacks.runner import (
    AttackOutcome,
    AttackReport,
    AttackVerdict,
    attack_environment,
)
from rollout_service.authoring.attacks.scripts import SCRIPTS, Attack

__all__ = ["SCRIPTS", "Attack", "AttackOutcome", "AttackReport", "AttackVerdict", "attack_environment"]
