"""A first choice of engine for each prompt, on which all nodes agree without talking to each other.

Guarantees: the order of engines for a prompt depends only on the prompt and the engines' ids, so every node computes
the same one. When an engine joins or leaves, only the prompts whose first choice it is change theirs.
"""

from collections.abc import Iterable
from hashlib import blake2b


def rank(prompt: int, backend_id: str) -> bytes:
    """Return the rank of an engine for a prompt with this hash; the least comes first."""
    return blake2b(f"{prompt}:{backend_id}".encode(), digest_size=8).digest()


def first_choice(prompt: int, backend_ids: Iterable[str]) -> str:
    """Return the engine that every node tries first for the prompt."""
    return min(backend_ids, key=lambda backend_id: rank(prompt, backend_id))
