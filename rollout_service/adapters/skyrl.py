"""The former path of `rollout_client.adapters.skyrl`."""

from rollout_client.adapters.skyrl import *  # noqa: F403
