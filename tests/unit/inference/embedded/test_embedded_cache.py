"""The prefix cache agrees with a list of everything that was ever put in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.kinds.embedded.cache import PrefixCache

SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def kv(ids, start=0):
    """Return KV marked with its prefix, which makes a mix-up visible; shape `[1 layer, 1 head, tokens, 1]`."""
    marks = [hash(tuple(ids[: end + 1])) % 100_003 for end in range(start, len(ids))]
    keys = np.array(marks, np.float32).reshape(1, 1, -1, 1)
    return keys, -keys


def insert(cache, ids, start=0):
    cache.insert(ids, *kv(ids, start), start=start)


def common(left, right):
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def joined(pieces):
    return np.concatenate([piece[0] for piece in pieces], axis=2) if pieces else np.zeros((1, 1, 0, 1))


@given(stored=st.lists(SEQUENCES, max_size=12), wanted=SEQUENCES)
def test_the_longest_stored_prefix_is_found_with_its_own_kv(stored, wanted):
    cache = PrefixCache(budget=10_000)
    for ids in stored:
        insert(cache, ids)
    length, pieces = cache.match(wanted)
    assert length == max((common(ids, wanted) for ids in stored), default=0)
    np.testing.assert_array_equal(joined(pieces), kv(wanted[:length])[0])
    for keys, values in pieces:
        np.testing.assert_array_equal(keys, -values)


@given(stored=st.lists(SEQUENCES, max_size=20))
def test_shared_prefixes_are_stored_once(stored):
    cache = PrefixCache(budget=10_000)
    for ids in stored:
        insert(cache, ids)
    prefixes = {tuple(ids[:end]) for ids in stored for end in range(1, len(ids) + 1)}
    assert cache.tokens == len(prefixes)


@given(stored=st.lists(SEQUENCES, max_size=20), budget=st.integers(0, 20))
def test_the_budget_holds_and_what_is_left_is_right(stored, budget):
    cache = PrefixCache(budget)
    for ids in stored:
        insert(cache, ids)
        assert 0 <= cache.tokens <= budget
    for ids in stored:
        length, pieces = cache.match(ids)
        np.testing.assert_array_equal(joined(pieces), kv(ids[:length])[0])


@given(turns=st.lists(SEQUENCES, min_size=1, max_size=5), budget=st.integers(0, 40))
def test_a_conversation_stored_turn_by_turn_is_whole_or_cut_at_its_end(turns, budget):
    cache, ids, stored = PrefixCache(budget), [], 0
    for turn in turns:
        ids = [*ids, *turn]
        insert(cache, ids, start=stored)
        stored = len(ids)
    length, pieces = cache.match(ids)
    np.testing.assert_array_equal(joined(pieces), kv(ids[:length])[0])
    assert length == len(ids) or len(ids) > budget


def test_the_least_recently_used_goes_first():
    cache = PrefixCache(budget=6)
    insert(cache, [1, 1, 1])
    insert(cache, [2, 2, 2])
    cache.match([1, 1, 1])
    insert(cache, [3, 3, 3])
    assert [cache.match([i] * 3)[0] for i in (1, 2, 3)] == [3, 0, 3]


def test_a_smaller_budget_forgets_and_clear_forgets_everything():
    cache = PrefixCache(budget=6)
    insert(cache, [1, 1, 1])
    insert(cache, [2, 2, 2])
    cache.resize(3)
    assert cache.tokens == 3
    cache.clear()
    assert cache.tokens == 0
    assert cache.match([2])[0] == 0


@pytest.mark.parametrize("budget", [0, -5])
def test_without_a_budget_nothing_is_kept(budget):
    cache = PrefixCache(budget)
    insert(cache, [1, 2, 3])
    assert cache.tokens == 0
