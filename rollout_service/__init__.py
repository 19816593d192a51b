"""Rollout-as-a-Service: a standalone HTTP service that runs agentic rollouts for any RL trainer."""

__version__ = "0.1.0"
