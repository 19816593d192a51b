"""The former path of `rollout_client.adapters.submit`."""

from rollout_client.adapters.submit import *  # noqa: F403
