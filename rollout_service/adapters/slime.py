"""The former path of `rollout_client.adapters.slime`."""

from rollout_client.adapters.slime import *  # noqa: F403
