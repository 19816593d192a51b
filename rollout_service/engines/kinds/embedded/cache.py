"""The prefix cache: a radix tree of token ids whose edges hold the KV of their tokens.

It holds copies, so evicting never disturbs a running sequence, and never more tokens than its budget; the least
recently used leaves go first. Matching and inserting are exact to the token, not to a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout_service.engines.kinds.embedded.weights import Array


@dataclass(slots=True, eq=False)
class _RadixNode:
    """An edge and its subtree. KV: `[layers, kv_heads, len(ids), head_dim]`."""

    ids: tuple[int, ...]
    keys: Array
    values: Array
    parent: "_RadixNode | None"
    used: int = 0
    children: dict[int, "_RadixNode"] = field(default_factory=dict)


class PrefixCache:
    """Holds the KV of at most `budget` tokens; used from one thread only."""

    def __init__(self, budget: int) -> None:
        self.budget = max(0, budget)
        self.tokens = 0
        self._uses = 0
        nothing = np.zeros((0, 0, 0, 0), np.float32)
        self._root = _RadixNode((), nothing, nothing, None)

    def match(self, ids: Sequence[int]) -> tuple[int, list[tuple[Array, Array]]]:
        """Return the length of the longest stored prefix of `ids`, and its KV in consecutive pieces."""
        length = 0
        pieces: list[tuple[Array, Array]] = []
        for child, common in self._path(ids):
            pieces.append((child.keys[:, :, :common], child.values[:, :, :common]))
            length += common
        return length, pieces

    def insert(self, ids: Sequence[int], keys: Array, values: Array, *, start: int = 0) -> None:
        """Store the KV of `ids[start:]`, where the first `start` ids are known to be stored.

        `keys` and `values` are `[layers, kv_heads, len(ids) - start, head_dim]` and are not copied. KV that is already
        stored stays. If the first `start` ids were evicted meanwhile, nothing is stored.
        """
        node, length = self._root, 0
        for child, common in self._path(ids):
            node = child if common == len(child.ids) else self._split(child, common)
            length += common
        if start <= length < len(ids):
            rest = slice(length - start, len(ids) - start)
            leaf = _RadixNode(tuple(ids[length:]), keys[:, :, rest], values[:, :, rest], node, self._uses)
            node.children[leaf.ids[0]] = leaf
            self.tokens += len(leaf.ids)
            self._evict()

    def resize(self, budget: int) -> None:
        self.budget = max(0, budget)
        self._evict()

    def clear(self) -> None:
        self._root.children.clear()
        self.tokens = 0

    def _path(self, ids: Sequence[int]) -> list[tuple[_RadixNode, int]]:
        """Return the nodes along `ids`, which are used now, with the number of ids that each has of them."""
        self._uses += 1
        found: list[tuple[_RadixNode, int]] = []
        node, length = self._root, 0
        while length < len(ids) and (child := node.children.get(ids[length])) is not None:
            common = _common_prefix(child.ids, ids, length)
            child.used = self._uses
            found.append((child, common))
            length += common
            if common < len(child.ids):
                break
            node = child
        return found

    def _split(self, node: _RadixNode, at: int) -> _RadixNode:
        """Cut an edge in two, and return the upper part."""
        upper = _RadixNode(
            node.ids[:at], node.keys[:, :, :at].copy(), node.values[:, :, :at].copy(), node.parent, node.used
        )
        if node.parent is not None:
            node.parent.children[upper.ids[0]] = upper
        node.ids = node.ids[at:]
        node.keys, node.values = node.keys[:, :, at:].copy(), node.values[:, :, at:].copy()
        node.parent = upper
        upper.children[node.ids[0]] = node
        return upper

    def _evict(self) -> None:
        while self.tokens > self.budget:  # repeats, since inner nodes may have become leaves
            for leaf in sorted(self._leaves(), key=lambda node: node.used):
                self._drop(leaf)
                if self.tokens <= self.budget:
                    break

    def _drop(self, leaf: _RadixNode) -> None:
        if leaf.parent is not None:
            del leaf.parent.children[leaf.ids[0]]
        self.tokens -= len(leaf.ids)

    def _leaves(self) -> Iterator[_RadixNode]:
        pending = [self._root]
        while pending:
            node = pending.pop()
            if not node.children and node is not self._root:
                yield node
            pending.extend(node.children.values())


def _common_prefix(edge: Sequence[int], ids: Sequence[int], offset: int) -> int:
    limit = min(len(edge), len(ids) - offset)
    return next((i for i in range(limit) if edge[i] != ids[offset + i]), limit)
