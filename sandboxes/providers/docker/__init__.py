"""Sandboxes in Docker containers."""
