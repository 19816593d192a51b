"""The blocks that one engine is expected to hold in its prefix cache.

A tree of blocks mirrors the engine's own: a prompt that was served is held from its beginning. Eviction is LRU, and
never removes a block before those that follow it. So the blocks of a chain that are held are its first ones, and memory
is bounded by the capacity.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class _Block:
    above: int | None
    """The hash of the block before it."""
    served_at: float = inf
    """When an answer first showed that it is held; infinite while its prompt is only on its way."""
    below: set[int] | None = None
    """The hashes of the blocks that follow it; most blocks at the end of a prompt never have any."""


class PrefixIndex:
    """The blocks that an engine holds, least recently used first; `capacity` counts blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        """The number of blocks that the engine has room for."""
        return self._capacity

    @capacity.setter
    def capacity(self, blocks: int) -> None:
        self._capacity = max(1, blocks)
        self._evict()

    def match(self, chain: Sequence[int]) -> int:
        """Return how many blocks of `chain` are held, looking at log2(len(chain)) of them."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def hold(self, chain: Sequence[int], *, served_at: float = inf) -> None:
        """Note that the engine holds these blocks, or showed so at `served_at`; of too many, keep the first."""
        blocks = self._blocks
        for position in range(min(len(chain), self._capacity) - 1, -1, -1):
            block = chain[position]
            known = blocks.get(block)
            if known is None:
                known = blocks[block] = _Block(chain[position - 1] if position else None)
            else:
                blocks.move_to_end(block)
            if served_at < known.served_at:
                known.served_at = served_at
        self._join(chain)
        self._evict()

    def served_before(self, block: int, moment: float) -> bool:
        """Return whether the engine was known to hold this block at that time."""
        return block in self._blocks and self._blocks[block].served_at <= moment

    def drop(self, block: int) -> None:
        """Drop a block that the engine has lost, with all its descendants."""
        if block not in self._blocks:
            return
        self._part(self._blocks[block].above, block)
        doomed = [block]
        while doomed:
            lost = self._blocks.pop(doomed.pop(), None)
            if lost is not None and lost.below:
                doomed.extend(lost.below)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()

    def _join(self, chain: Sequence[int]) -> None:
        """Link every block to the one that follows it."""
        for position in range(min(len(chain), self._capacity) - 1, 0, -1):
            above = self._blocks[chain[position - 1]]
            if above.below is None:
                above.below = {chain[position]}
            elif chain[position] in above.below:
                return  # the blocks above it are linked already
            else:
                above.below.add(chain[position])

    def _evict(self) -> None:
        while len(self._blocks) > self._capacity:
            block, gone = self._blocks.popitem(last=False)
            self._part(gone.above, block)

    def _part(self, above: int | None, block: int) -> None:
        parent = self._blocks.get(above) if above is not None else None
        if parent is not None and parent.below:
            parent.below.discard(block)
