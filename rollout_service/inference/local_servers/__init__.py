"""Starts engine servers on this machine."""
