"""The former path of `rollout_client.runs`."""

from rollout_client.runs import *  # noqa: F403
