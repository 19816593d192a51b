"""Environments that a server of OpenEnv runs."""
