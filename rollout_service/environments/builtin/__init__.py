"""Environments that ship with the service."""
