"""The former path of `rollout_client.errors`."""

from rollout_client.errors import *  # noqa: F403
