"""The former path of `rollout_client.adapters.weights`."""

from rollout_client.adapters.weights import *  # noqa: F403
