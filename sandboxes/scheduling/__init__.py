"""Warm sandboxes, admission, and resource pressure."""
