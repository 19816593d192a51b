"""Sandboxes in Apptainer: rootless, without a daemon."""
