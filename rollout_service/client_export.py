"""The former path of `rollout_client.run_export`."""

from rollout_client.run_export import *  # noqa: F403
