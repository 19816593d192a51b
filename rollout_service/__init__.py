"""Rollout-as-a-Service: a standalone HTTP service that runs agentic rollouts for any RL trainer."""

from rollout_client import __version__ as __version__
