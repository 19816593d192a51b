"""A prefix cache like an engine's: pages of tokens; the least recently used goes first, and pages in use stay.

It only counts, and holds no tensors. It is deterministic: its content depends only on the calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Page:
    tokens: tuple[int, ...]
    above: "_Page | None"
    below: dict[tuple[int, ...], "_Page"] = field(default_factory=dict)
    users: int = 0


@dataclass(slots=True, eq=False)
class CacheHold:
    """The pages of one request, kept until `KVCache.release`."""

    cached_tokens: int
    """Prompt tokens that were cached already."""
    pages: list[_Page]


class KVCache:
    """A tree of pages.

    Args:
        capacity: tokens that fit; None for no bound.
        page: tokens per page, which are cached together or not at all.
    """

    def __init__(self, capacity: int | None = None, *, page: int = 16) -> None:
        self._capacity = capacity
        self._page = page
        self._root = _Page((), None)
        self._pages: dict[_Page, None] = {}

    @property
    def used_tokens(self) -> int:
        """Tokens that are held, in use or not."""
        return len(self._pages) * self._page

    def take(self, ids: Sequence[int]) -> CacheHold:
        """Hold the cached pages of `ids`, and add its other whole pages as far as there is room.

        As in an engine, the last token counts as uncached: it has to be read for the next one to be sampled.
        """
        pages: list[_Page] = []
        at = self._root
        for tokens in self._split(ids):
            found = at.below.get(tokens)
            if found is None:
                break
            at = found
            self._use(at)
            pages.append(at)
        cached = min(len(pages) * self._page, len(ids) - 1)
        self._grow(at, ids, pages)
        return CacheHold(cached, pages)

    def extend(self, hold: CacheHold, ids: Sequence[int]) -> None:
        """Add the pages of a request's output; `ids` are its prompt and output."""
        self._grow(hold.pages[-1] if hold.pages else self._root, ids, hold.pages)

    def release(self, hold: CacheHold) -> None:
        """Release the pages of a request that has ended; they stay cached until their room is needed."""
        for page in reversed(hold.pages):  # so a page is evicted after those that follow it
            page.users -= 1
            self._touch(page)
        hold.pages.clear()

    def flush(self) -> None:
        """Evict every page that is not in use."""
        while self._evict_one():
            continue

    def _split(self, ids: Sequence[int], start: int = 0) -> Iterator[tuple[int, ...]]:
        for begin in range(start * self._page, len(ids) - self._page + 1, self._page):
            yield tuple(ids[begin : begin + self._page])

    def _grow(self, at: _Page, ids: Sequence[int], pages: list[_Page]) -> None:
        for tokens in self._split(ids, len(pages)):
            found = at.below.get(tokens)
            if found is None:
                if not self._has_room():
                    return
                found = at.below[tokens] = _Page(tokens, at)
            at = found
            self._use(at)
            pages.append(at)

    def _use(self, page: _Page) -> None:
        page.users += 1
        self._touch(page)

    def _touch(self, page: _Page) -> None:
        self._pages.pop(page, None)
        self._pages[page] = None

    def _has_room(self) -> bool:
        return self._capacity is None or self.used_tokens + self._page <= self._capacity or self._evict_one()

    def _evict_one(self) -> bool:
        """Evict the least recently used leaf that is not in use, and return whether there was one."""
        for page in self._pages:
            if not page.users and not page.below and page.above is not None:
                del self._pages[page]
                del page.above.below[page.tokens]
                return True
        return False
