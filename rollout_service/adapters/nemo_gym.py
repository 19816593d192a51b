"""The former path of `rollout_client.adapters.nemo_gym`."""

from rollout_client.adapters.nemo_gym import *  # noqa: F403
