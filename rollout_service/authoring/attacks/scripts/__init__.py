"""The attacks: ways, seen or possible, in which a policy gets rewarded for nothing, or avoids being scored.

Each is a bash script that runs in the agent's own sandbox as the agent's user. They forge the results of graders that
write `{"reward": 1}` to `$ROLLOUT_RESULT` and of those that print it, wherever a program, library, setting or file of
theirs is executed or interpreted after the agent. They need bash and the core utilities, and Python where the image has
it.
"""

from rollout_service.authoring.attacks.scripts.attack import PRELUDE, Attack
from rollout_service.authoring.attacks.scripts.files import FILES
from rollout_service.authoring.attacks.scripts.processes import PROCESSES
from rollout_service.authoring.attacks.scripts.programs import PROGRAMS, PYTHON
from rollout_service.authoring.attacks.scripts.results import RESULTS, SUBMISSIONS

SCRIPTS: tuple[Attack, ...] = (
    Attack("idle", "does nothing", ":"),
    *PROGRAMS,
    *PYTHON,
    *PROCESSES,
    *FILES,
    *RESULTS,
    *SUBMISSIONS,
)

CAUSES: dict[str, str] = {
    attack.name: cause
    for attacks, cause in (
        (PROGRAMS, "the grader runs programs, or obeys settings, that the agent can change"),
        (PYTHON, "the grader's Python reads folders that the agent can write to"),
        (PROCESSES, "the agent's processes are alive while it is graded"),
        (FILES, "the grader trusts the form of the agent's files"),
        (RESULTS, "the grader believes results that the agent wrote"),
        (SUBMISSIONS, "the agent's program runs beside the grader, or is believed"),
    )
    for attack in attacks
}
"""The weakness that each attack uses, by the attack's name."""

__all__ = ["CAUSES", "PRELUDE", "SCRIPTS", "Attack"]
