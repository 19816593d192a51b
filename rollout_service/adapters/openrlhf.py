"""The former path of `rollout_client.adapters.openrlhf`."""

from rollout_client.adapters.openrlhf import *  # noqa: F403
