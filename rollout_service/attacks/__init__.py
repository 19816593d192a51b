"""Reward hacks against an environment's grading, run in real sandboxes: `rollout-service env attack`.

`attack_environment` runs them and returns a report; `SCRIPTS` are the attacks.
"""

from rollout_service.attacks.runner import Outcome, Report, Verdict, attack_environment
from rollout_service.attacks.scripts import SCRIPTS, Attack

__all__ = ["SCRIPTS", "Attack", "Outcome", "Report", "Verdict", "attack_environment"]
