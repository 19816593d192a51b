"""The program of `rollout-service trainer check`. It reports by a pipe, since trainers write to both outputs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from typing import Any

from api_schemas.tasks import Task
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.sync import SyncRolloutClient
from rollout_client.trainer_check.check import Plan, run


def main() -> int:
    arguments = _arguments()
    submitter = RolloutSubmitter.from_environment(pool=arguments.pool, retries=1)
    module = import_module(f"rollout_client.trainer_check.{arguments.trainer}")
    with os.fdopen(arguments.fd, "w", buffering=1) as pipe:

        def tell(**line: Any) -> None:
            pipe.write(json.dumps(line) + "\n")

        plan = _plan(submitter, arguments)
        report = run(module.TRAINER, submitter, plan, lambda line: tell(progress=line))
        tell(report=report.json())
    return 1 if report.problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer")
    parser.add_argument("--fd", type=int, default=1)
    parser.add_argument("--pool", default="policy")
    parser.add_argument("--environment", default="calc")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--weights")
    return parser.parse_args()


def _plan(submitter: RolloutSubmitter, arguments: argparse.Namespace) -> Plan:
    with SyncRolloutClient(submitter.url, submitter.key) as client:
        rows = client.dataset(arguments.environment, limit=arguments.tasks)
        pools = {one.pool for one in client.backends()}
    if len(rows) < 2:
        raise SystemExit(f"{arguments.environment!r} ships {len(rows)} instances, and the check needs two or more")
    if arguments.pool not in pools:
        raise SystemExit(f"the pool {arguments.pool!r} has no engine; there are {', '.join(sorted(pools)) or 'none'}")
    return Plan(
        tasks=[Task(environment=arguments.environment, instance=row) for row in rows],
        steps=arguments.steps,
        group=arguments.group,
        learning_rate=arguments.learning_rate,
        pool=arguments.pool,
        weights=arguments.weights,
    )


if __name__ == "__main__":
    sys.exit(main())
