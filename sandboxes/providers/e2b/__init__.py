"""Sandboxes of a server that speaks E2B's API."""
