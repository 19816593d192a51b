"""The former path of `rollout_client.client`."""

from rollout_client.client import *  # noqa: F403
