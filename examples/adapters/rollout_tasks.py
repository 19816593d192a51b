"""The service's tasks as a taskset of verifiers, whose id is `rollout-tasks`, with the environment that runs them.

Put this file where verifiers can import it (PYTHONPATH, or a package of yours), on the trainer and on the server.

    vf-eval rollout-tasks --env.taskset.environment calc -n 8
"""

from rollout_client.adapters.verifiers import ServiceEnv, ServiceTaskset

__all__ = ["ServiceEnv", "ServiceTaskset"]
