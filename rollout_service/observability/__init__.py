"""Metrics, logs, timelines and traces."""
