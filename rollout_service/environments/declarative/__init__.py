"""Environments declared in an `environment.toml`."""
