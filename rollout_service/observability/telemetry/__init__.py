"""Metrics, logs, and traces."""
