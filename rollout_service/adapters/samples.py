"""The former path of `rollout_client.adapters.samples`."""

from rollout_client.adapters.samples import *  # noqa: F403
