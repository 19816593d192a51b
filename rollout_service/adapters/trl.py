"""The former path of `rollout_client.adapters.trl`."""

from rollout_client.adapters.trl import *  # noqa: F403
