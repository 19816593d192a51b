"""An engine is believed to hold chains of blocks; the least recently used go first, and no chain has a hole."""

from hypothesis import example, given
from hypothesis import strategies as st

from rollout_service.engines.routing.engine_model import BLOCK_TOKENS, Chains, PrefixIndex, extend_chain

TOKENS = st.lists(st.integers(0, 3), max_size=6).map(
    lambda blocks: [token for block in blocks for token in [block] * BLOCK_TOKENS]
)


def chain(*blocks):
    return extend_chain((), [block for block in blocks for _ in range(BLOCK_TOKENS)])


# ---- chains


def test_prompts_share_the_blocks_that_they_agree_on_from_the_beginning():
    assert chain(1, 2, 3)[:2] == chain(1, 2, 9)[:2]
    assert chain(1, 2, 3)[2] != chain(1, 9, 3)[2]
    assert extend_chain((), list(range(BLOCK_TOKENS - 1))) == []


@given(first=TOKENS, more=TOKENS, tail=st.integers(0, BLOCK_TOKENS - 1))
def test_a_conversation_has_the_chain_of_its_whole_prompt(first, more, tail):
    chains = Chains()
    chains.of(first + [7] * tail, "a")
    whole = first + [7] * tail + more
    assert chains.of(whole, "a") == extend_chain((), whole)


@given(first=TOKENS, more=TOKENS)
def test_a_chain_is_extended_without_the_ids_that_it_covers(first, more):
    known = extend_chain((), first)
    begin = len(known) * BLOCK_TOKENS
    assert extend_chain(known, [*first[begin:], *more], begin=begin) == extend_chain((), first + more)


@given(first=TOKENS, second=TOKENS)
def test_a_conversation_whose_end_was_edited_is_hashed_again(first, second):
    chains = Chains()
    chains.of(first, "a")
    last = slice(max(0, len(first) - BLOCK_TOKENS), len(first))
    if second[last] != first[last]:
        assert chains.of(second, "a") == extend_chain((), second)


def test_only_so_many_conversations_are_remembered():
    chains = Chains(most=3)
    for name in "abcde":
        chains.of(list(range(BLOCK_TOKENS)), name)
    assert len(chains) == 3
    chains.drop("e")
    chains.drop("never seen")
    assert len(chains) == 2


def test_a_prompt_without_a_name_is_not_remembered():
    chains = Chains()
    assert chains.of([1] * BLOCK_TOKENS, None) == chain(1)
    assert len(chains) == 0


# ---- what is held


def test_a_prompt_is_held_from_its_beginning():
    index = PrefixIndex(10)
    index.hold(chain(1, 2, 3))
    assert index.match(chain(1, 2, 3, 4)) == 3
    assert index.match(chain(1, 2, 9)) == 2
    assert index.match(chain(2)) == 0


def test_the_prompt_that_was_used_last_stays_longest():
    index = PrefixIndex(4)
    index.hold(chain(1, 2))
    index.hold(chain(3, 4))
    index.hold(chain(1, 2))
    index.hold(chain(5, 6))
    assert [index.match(chain(*blocks)) for blocks in [(1, 2), (3, 4), (5, 6)]] == [2, 0, 2]


def test_the_end_of_a_prompt_is_evicted_before_its_beginning():
    index = PrefixIndex(3)
    index.hold(chain(1, 2, 3))
    index.hold(chain(9))
    assert index.match(chain(1, 2, 3)) == 2


def test_blocks_after_a_lost_block_are_lost():
    index = PrefixIndex(20)
    index.hold(chain(1, 2, 3))
    index.hold(chain(1, 2, 4))
    index.hold(chain(5))
    index.drop(chain(1, 2)[1])
    assert [index.match(chain(*blocks)) for blocks in [(1, 2, 3), (1, 2, 4), (5,)]] == [1, 1, 1]
    index.drop(chain(1, 2)[1])
    assert len(index) == 2


def test_a_smaller_capacity_is_kept_at_once():
    index = PrefixIndex(10)
    index.hold(chain(1, 2, 3, 4))
    index.capacity = 2
    assert (len(index), index.match(chain(1, 2, 3, 4))) == (2, 2)


def test_more_than_fits_is_held_from_its_beginning():
    index = PrefixIndex(2)
    index.hold(chain(1, 2, 3, 4))
    assert index.match(chain(1, 2, 3, 4)) == 2


def test_it_is_known_since_when_a_block_was_seen_to_be_held():
    index = PrefixIndex(10)
    index.hold(chain(1, 2))
    assert not index.served_before(chain(1)[0], 100.0)
    index.hold(chain(1), served_at=5.0)
    index.hold(chain(1, 2), served_at=9.0)
    assert index.served_before(chain(1)[0], 5.0)
    assert not index.served_before(chain(1, 2)[1], 8.0)
    assert not index.served_before(chain(7)[0], 100.0)


STEPS = st.one_of(
    st.tuples(st.just("hold"), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
    st.tuples(st.just("drop"), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
    st.tuples(st.just("resize"), st.integers(1, 12)),
)


@given(steps=st.lists(STEPS, max_size=40), wanted=st.lists(st.integers(0, 2), max_size=5))
def test_chains_have_no_holes_and_memory_has_a_bound(steps, wanted):
    index = PrefixIndex(8)
    for step, value in steps:
        if step == "hold":
            index.hold(chain(*value))
            assert index.match(chain(*value)) == min(len(value), index.capacity)
        elif step == "drop":
            index.drop(chain(*value)[-1])
            assert index.match(chain(*value)) < len(value)
        else:
            index.capacity = value
        assert len(index) <= index.capacity
    held = [block in index._blocks for block in chain(*wanted)]
    assert held == sorted(held, reverse=True)
    assert index.match(chain(*wanted)) == sum(held)
    known = {block for entry in index._blocks.values() for block in entry.below or ()}
    assert known <= set(index._blocks)


HOLDS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 8)), max_size=40)


@given(steps=HOLDS)
def test_what_is_evicted_is_what_was_used_least_recently(steps):
    index, used = PrefixIndex(8), {}
    for now, (value, capacity) in enumerate(steps):
        index.capacity = capacity
        index.hold(chain(*value), served_at=now)
        # All blocks of a chain are used at once, the first one last; so each is used after those that follow it.
        used |= {block: (now, -depth) for depth, block in enumerate(chain(*value)[:capacity])}
        for block in sorted(used, key=used.__getitem__)[: max(0, len(used) - capacity)]:
            del used[block]
        assert set(index._blocks) == set(used)


def test_hashes_that_collide_are_no_error():
    index = PrefixIndex(3)
    for colliding in [[1, 2, 3], [9, 2, 1], [2, 1], [5, 3, 2, 1], [3], [4, 1]]:
        index.hold(colliding, served_at=1.0)
        index.drop(2)
        assert len(index) <= 3
    index.hold([6, 7, 8])
    assert index.match([6, 7, 8]) == 3


@given(steps=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6), max_size=40))
@example([[4, 5, 5], [0, 1, 2], [0, 1, 2, 3, 4, 6]])
def test_whatever_collides_memory_has_a_bound(steps):
    index = PrefixIndex(5)
    for number, blocks in enumerate(steps):
        index.hold(blocks)
        if number % 3 == 0:
            index.drop(blocks[0])
        assert len(index) <= 5
