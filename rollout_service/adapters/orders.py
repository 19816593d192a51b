"""The former path of `rollout_client.adapters.submit`."""

from rollout_client.adapters.submit import *  # noqa: F403
from rollout_client.adapters.submit import RolloutSubmitter as Orders  # noqa: F401
