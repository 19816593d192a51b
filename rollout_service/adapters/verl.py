"""The former path of `rollout_client.adapters.verl`."""

from rollout_client.adapters.verl import *  # noqa: F403
