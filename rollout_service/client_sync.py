"""The former path of `rollout_client.sync`."""

from rollout_client.sync import *  # noqa: F403
