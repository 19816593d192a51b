"""The former path of `rollout_client.arrays`."""

from rollout_client.arrays import *  # noqa: F403
