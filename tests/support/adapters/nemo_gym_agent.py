"""An agent server of NeMo Gym whose rollouts are joined or fail by the plan in ROLLOUT_PLAN; an `app.py`."""

from __future__ import annotations

import json
import os

from real_rollouts import PlannedSubmitter

from rollout_client.adapters.nemo_gym import agent_class

if __name__ == "__main__":
    plan = json.loads(os.environ["ROLLOUT_PLAN"])
    agent_class(PlannedSubmitter.from_environment(retries=1).planned(plan)).run_webserver()
