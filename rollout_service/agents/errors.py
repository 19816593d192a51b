"""Errors of the tools that agents call."""

from __future__ import annotations


class ToolInputError(Exception):
    """A tool call that cannot be carried out as the policy wrote it; the policy reads the message."""
