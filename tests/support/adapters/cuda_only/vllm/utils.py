"""The function that names requests."""

from uuid import uuid4


def random_uuid() -> str:
    """Return a new id."""
    return uuid4().hex
