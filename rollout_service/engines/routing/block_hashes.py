"""Prompts as chains of block hashes: two prompts share a block if they agree on it and on all before it.

Guarantees: only the new part of a conversation is hashed, and the number of conversations remembered is bounded.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 64
_MAX_CONVERSATIONS = 65_536


def extend_chain(chain: Sequence[int], ids: Sequence[int], *, begin: int = 0) -> list[int]:
    """Return the hashes of all whole blocks of a prompt; `chain` has the first ones, and `ids` all from `begin` on.

    Python's own hash of integers is the same in every process; two blocks that collide cost a wrong
    estimate and nothing else.
    """
    hashes = list(chain)
    above = hashes[-1] if hashes else 0
    for start in range(len(hashes) * BLOCK_TOKENS - begin, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        above = hash((above, tuple(ids[start : start + BLOCK_TOKENS])))
        hashes.append(above)
    return hashes


class Chains:
    """The chains of conversations by name; one that was unused for long is forgotten, and hashed from the start."""

    def __init__(self, *, most: int = _MAX_CONVERSATIONS) -> None:
        self._most = most
        self._chains: OrderedDict[str, list[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    def of(self, ids: Sequence[int], name: str | None) -> list[int]:
        """Return the chain of a prompt, which usually extends the last one of the conversation `name`."""
        known = self._chains.get(name, []) if name is not None else []
        chain = extend_chain(known if _begins_with(ids, known) else (), ids)
        self.keep(chain, name)
        return chain

    def keep(self, chain: list[int], name: str | None) -> None:
        if name is None:
            return
        self._chains[name] = chain
        self._chains.move_to_end(name)
        if len(self._chains) > self._most:
            self._chains.popitem(last=False)

    def drop(self, name: str) -> None:
        self._chains.pop(name, None)


def _begins_with(ids: Sequence[int], chain: Sequence[int]) -> bool:
    """Return whether the last block of `chain` is in its place; an edit before it nearly always moves it."""
    end = len(chain) * BLOCK_TOKENS
    if not chain or end > len(ids):
        return False
    above = chain[-2] if len(chain) > 1 else 0
    return hash((above, tuple(ids[end - BLOCK_TOKENS : end]))) == chain[-1]
