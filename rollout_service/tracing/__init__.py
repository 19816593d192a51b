"""Timelines and traces of rollouts, for other tools."""
