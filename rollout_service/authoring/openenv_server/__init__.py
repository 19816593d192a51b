"""Environments of this service for clients of OpenEnv."""
