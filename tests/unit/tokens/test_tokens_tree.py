"""Trees of turns, chosen turns and finished trajectories keep every sampled token once, and damage is found."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, SegmentRole, Trajectory
from rollout_service.engines.contract import ReturnedExtras, TopLogprob
from rollout_service.store.codec import trajectories as codec
from rollout_service.tokens import TurnTree, check_invariants
from rollout_service.tokens.errors import InvariantError, RecordError
from rollout_service.tokens.trajectory import train_on
from tests.support.tokens.chat_formats import load
from tests.support.tokens.conversations import QUESTION, TOOL, TURNS, answers_to
from tests.unit.live.test_replay import Stored

ANSWER = "Fine."
MORE = [Message(role="user", content="More")]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return load(tmp_path_factory.mktemp("formats"), "qwen3")


@pytest.fixture
def tree(renderer):
    return TurnTree(renderer)


def record(tree, renderer, prompt, text=ANSWER, **options):
    ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
    return tree.record(prompt, ids, [-0.5] * len(ids), [3] * len(ids), FinishReason.STOP, **options)


def sampled(segment):
    return sorted({turn for turn in segment.turn_ids if turn >= 0})


def test_turns_that_extend_each_other_are_one_segment(tree, renderer):
    first = record(tree, renderer, tree.begin([QUESTION], [TOOL]))
    prompt = tree.extend(first, MORE, [TOOL])
    assert list(prompt.ids[: prompt.known]) == first.ids()
    second = record(tree, renderer, prompt)
    (segment,) = tree.trajectory().segments
    assert segment.token_ids == second.ids()
    assert (segment.fork_reason, segment.parent, sampled(segment)) == (ForkReason.FIRST, None, [0, 1])


def test_a_turn_may_be_continued_twice(tree, renderer):
    first = record(tree, renderer, tree.begin([QUESTION]))
    both = [tree.extend(first, [Message(role="user", content=text)]) for text in ("One", "Two")]
    one, two = (record(tree, renderer, prompt) for prompt in both)
    trunk, branch = tree.trajectory().segments
    assert (sampled(trunk), sampled(branch)) == ([0, 1], [2])
    assert (branch.fork_reason, branch.parent) == (ForkReason.BRANCH, 0)
    assert branch.token_ids == two.ids()
    assert first.end <= branch.shared_prefix < two.prompt_length
    assert one.ids()[: first.end] == two.ids()[: first.end] == first.ids()


def test_a_prompt_may_be_answered_twice_alike(tree, renderer):
    first = record(tree, renderer, tree.begin([QUESTION]))
    again = record(tree, renderer, tree.begin([QUESTION], reason=ForkReason.BRANCH, after=first))
    one, two = tree.trajectory().segments
    assert first.ids() == again.ids()
    assert (two.parent, two.shared_prefix, sampled(two)) == (0, again.prompt_length, [1])
    check_invariants(tree.trajectory())
    assert one.fork_reason is ForkReason.FIRST


def test_what_is_not_trained_is_apart_and_leaves_the_rest_as_it_is(tree, renderer):
    title = record(tree, renderer, tree.begin(MORE), role=SegmentRole.SIDE, trained=False)
    first = record(tree, renderer, tree.begin([QUESTION]))
    lost = record(tree, renderer, tree.extend(first, MORE), trained=False)
    again = record(tree, renderer, tree.extend(first, MORE))
    record(tree, renderer, tree.extend(lost, MORE))
    trajectory = tree.trajectory()
    trunk, after_lost = trajectory.segments
    assert (sampled(trunk), trunk.fork_reason, trunk.token_ids) == ([1, 3], ForkReason.FIRST, again.ids())
    assert (sampled(after_lost), after_lost.parent) == ([4], 0)
    side, leaf = trajectory.untrained
    assert (side.role, side.fork_reason, side.token_ids) == (
        SegmentRole.SIDE,
        ForkReason.NEW_ROOT,
        title.ids(),
    )
    assert (sampled(leaf), leaf.parent, sum(leaf.loss_mask)) == ([2], 0, len(lost.output_ids))
    assert trajectory.fork_counts == {ForkReason.FIRST: 1, ForkReason.NEW_ROOT: 1, ForkReason.BRANCH: 2}
    check_invariants(trajectory)


def test_a_trajectory_is_written_and_read_with_what_is_not_trained(tree, renderer):
    first = record(tree, renderer, tree.begin([QUESTION]))
    plain = tree.trajectory()
    assert "untrained" not in plain.model_dump_json()
    assert "role" not in plain.segments[0].model_dump()
    record(tree, renderer, tree.extend(first, MORE), role=SegmentRole.SUBAGENT, trained=False)
    trajectory = tree.trajectory([QUESTION])
    assert trajectory.untrained[0].role is SegmentRole.SUBAGENT
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory
    data = codec.encode(trajectory)
    assert codec.decode(data) == trajectory
    head, columns = codec.split(data)
    assert [len(column) for column in columns] == [len(trajectory.segments[0].token_ids)]
    assert [segment.token_ids for segment in (*head.segments, *head.untrained)] == [[], []]
    assert [len(column) for column in codec.columns_of(data)] == [len(trajectory.segments[0].token_ids)]


def test_an_answer_that_cannot_be_trained_on_is_not_recorded(tree):
    prompt = tree.begin([QUESTION])
    with pytest.raises(RecordError):
        tree.record(prompt, [1, 2], [-1.0], [0, 0], FinishReason.STOP)
    with pytest.raises(RecordError):
        tree.record(prompt, [1], [-1.0], [0], FinishReason.STOP, ReturnedExtras(prompt_logprobs=[None]))
    assert tree.turns == ()


def extras(prompt, count, seed):
    return ReturnedExtras(
        top_logprobs=[[TopLogprob(seed, -0.5)]] * count,
        prompt_logprobs=[-float(seed + 1)] * (len(prompt.ids) - prompt.known),
        routed_experts=np.full((len(prompt.ids) + count - 1 - prompt.routed, 2, 1), seed, np.int32),
    )


def test_extras_of_a_branch_hold_those_of_the_turns_before_it(tree, renderer):
    def turn(prompt, seed):
        return record(tree, renderer, prompt, extras=extras(prompt, len(renderer.encode(ANSWER)) + 1, seed))

    first = turn(tree.begin([QUESTION]), 0)
    turn(tree.extend(first, MORE), 1)
    second = turn(tree.extend(first, [*MORE, *MORE]), 2)
    trajectory = tree.trajectory()
    check_invariants(trajectory)
    branch = trajectory.segments[1]
    end, begin = first.prompt_length, second.prompt_length
    assert branch.prompt_logprobs[:end] == [-1.0] * end
    assert branch.prompt_logprobs[end : first.end] == [None] * (first.end - end)
    assert branch.prompt_logprobs[first.end : begin] == [-3.0] * (begin - first.end)
    assert branch.top_ids == [[]] * begin + [[2]] * (second.end - begin)
    assert branch.routed_experts.shape == [second.end - 1, 2, 1]


@pytest.mark.parametrize("trained", [True, False])
def test_a_turn_without_extras_leaves_those_of_the_others_at_their_tokens(tree, renderer, trained):
    def turn(prompt, seed, **options):
        return record(tree, renderer, prompt, extras=extras(prompt, len(renderer.encode(ANSWER)) + 1, seed), **options)

    first = turn(tree.begin([QUESTION]), 0)
    cut_off = record(tree, renderer, tree.extend(first, MORE), trained=trained)
    check_invariants(tree.trajectory())
    assert [*tree.trajectory().segments, *tree.trajectory().untrained][-1].routed_experts is None
    last = turn(tree.extend(cut_off, MORE), 2)
    trajectory = tree.trajectory()
    check_invariants(trajectory)
    segment = trajectory.segments[-1]
    assert segment.prompt_logprobs[cut_off.end : last.prompt_length] == [-3.0] * (last.prompt_length - cut_off.end)
    assert segment.prompt_logprobs[first.end : cut_off.end] == [None] * (cut_off.end - first.end)
    assert segment.top_ids[cut_off.prompt_length :] == [[]] * (last.prompt_length - cut_off.prompt_length) + [[2]] * (
        last.end - last.prompt_length
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_every_sampled_token_of_a_random_tree_is_in_one_segment(renderer, seed):
    random = Random(seed)
    tree = TurnTree(renderer)
    planned = []
    for _ in range(random.randint(1, 25)):
        if planned and random.random() < 0.5:
            prompt, turn = planned.pop(random.randrange(len(planned)))
            role = random.choice([*SegmentRole, SegmentRole.MAIN])
            trained = role is SegmentRole.MAIN and random.random() < 0.8
            text = random.choice([ANSWER, "", "<think>\nHm", '<tool_call>\n{"name": "python", "arg'])
            recorded = record(tree, renderer, prompt, text, role=role, trained=trained)
            assert recorded.ids()[: prompt.known] == ([] if turn is None else turn.ids())
        elif tree.turns and random.random() < 0.8:
            turn = random.choice(tree.turns)
            prompt = tree.extend(turn, answers_to(random.choice(list(TURNS.values()))), [TOOL])
            if prompt is not None:
                planned.append((prompt, turn))
        else:
            after = random.choice([None, *tree.turns])
            planned.append((tree.begin([QUESTION, *MORE], [TOOL], ForkReason.HISTORY_EDITED, after), None))
    trajectory = tree.trajectory()
    check_invariants(trajectory)
    assert codec.decode(codec.encode(trajectory)) == trajectory
    assert all(tree.turns[turn].trained for part in trajectory.segments for turn in sampled(part))
    assert not any(tree.turns[turn].trained for part in trajectory.untrained for turn in sampled(part))
    for turn in tree.turns:
        (segment,) = (part for part in (*trajectory.segments, *trajectory.untrained) if turn.turn_id in part.turn_ids)
        assert segment.token_ids[: turn.end] == turn.ids()
        at = [index for index, number in enumerate(segment.turn_ids) if number == turn.turn_id]
        assert at == list(range(turn.prompt_length, turn.end))


def sampled_tokens(trajectory: Trajectory) -> dict[int, list[tuple[int, float, int]]]:
    """Return the tokens of each turn that is trained on, with their numbers."""
    found: dict[int, list[tuple[int, float, int]]] = {}
    for segment in (*trajectory.segments, *trajectory.untrained):
        columns = (segment.turn_ids, segment.loss_mask, segment.token_ids, segment.logprobs, segment.versions)
        for turn, mask, *values in zip(*columns, strict=True):
            if mask:
                found.setdefault(turn, []).append(tuple(values))
    return found


def contexts(trajectory: Trajectory) -> dict[int, list[int]]:
    """Return what each turn was sampled on."""
    return {
        turn: segment.token_ids[: segment.turn_ids.index(turn)]
        for segment in (*trajectory.segments, *trajectory.untrained)
        for turn in set(segment.turn_ids) - {-1}
    }


@given(st.integers(0, 2**32), st.integers(1, 12), st.data())
def test_mask_1_stays_on_the_chosen_turns_alone(seed, steps, data):
    session = Stored(Random(seed))
    for _ in range(steps):
        session.step()
    whole = session.capture.trajectory()
    all_sampled = sampled_tokens(whole)
    chosen = data.draw(st.sets(st.sampled_from(sorted(all_sampled)), min_size=1)) if all_sampled else set()
    if not chosen:
        return
    selected = train_on(whole, chosen)
    check_invariants(selected)
    assert sampled_tokens(selected) == {turn: all_sampled[turn] for turn in chosen}
    assert contexts(selected) == {turn: contexts(whole)[turn] for turn in chosen}
    assert all(any(segment.loss_mask) and segment.loss_mask[-1] for segment in selected.segments)
    assert (selected.messages, selected.finish_reasons) == (whole.messages, whole.finish_reasons)


def test_a_turn_that_is_not_there_is_an_error():
    session = Stored(Random(1), is_plain=True)
    session.step()
    with pytest.raises(InvariantError, match="turn 7 is in no segment"):
        train_on(session.capture.trajectory(), {0, 7})


def segment(**changes):
    fields = {
        "token_ids": [5, 6, 7, 8, 9],
        "loss_mask": [0, 1, 1, 0, 1],
        "logprobs": [0.0, -1.0, -2.0, 0.0, -3.0],
        "versions": [-1, 4, 4, -1, 5],
        "turn_ids": [-1, 0, 0, -1, 1],
        "fork_reason": ForkReason.FIRST,
    }
    return Segment.model_construct(**{**fields, **changes})


def trajectory(*segments, **changes):
    counts = {}
    for part in segments:
        counts[part.fork_reason] = counts.get(part.fork_reason, 0) + 1
    fields = {
        "segments": list(segments),
        "messages": [],
        "finish_reasons": [FinishReason.STOP] * 9,
        "fork_counts": counts,
    }
    return Trajectory.model_construct(**{**fields, **changes})


def test_a_whole_trajectory_passes():
    second = segment(turn_ids=[-1, 2, 2, -1, 3], fork_reason=ForkReason.COMPACTION)
    check_invariants(trajectory(segment(), second))
    check_invariants(trajectory())


@pytest.mark.parametrize(
    ("changes", "index"),
    [
        ({"loss_mask": [0, 1, 1, 0]}, 4),
        ({"logprobs": [0.0, -1.0, -2.0, 0.0, -3.0, 0.0]}, 5),
        ({"token_ids": [5, 6, -7, 8, 9]}, 2),
        ({"loss_mask": [0, 1, 0, 0, 1]}, 2),
        ({"loss_mask": [0, 1, 1, 1, 1]}, 3),
        ({"loss_mask": [0, 1, 2, 0, 1]}, 2),
        ({"logprobs": [-0.5, -1.0, -2.0, 0.0, -3.0]}, 0),
        ({"logprobs": [0.0, -1.0, float("nan"), 0.0, -3.0]}, 2),
        ({"versions": [-1, 4, -1, -1, 5]}, 2),
        ({"versions": [-1, 4, 4, 4, 5]}, 3),
        ({"turn_ids": [-1, 0, 0, -1, 0]}, 4),
        ({"turn_ids": [-1, 1, 1, -1, 0]}, 4),
    ],
)
def test_a_damaged_token_is_found_where_it_is(changes, index):
    with pytest.raises(InvariantError) as caught:
        check_invariants(trajectory(segment(**changes)))
    assert (caught.value.segment, caught.value.index) == (0, index)
    assert caught.value.context == {"segment": 0, "index": index}


def test_a_token_is_trainable_once():
    again = segment(fork_reason=ForkReason.BRIDGE_REFUSED)
    with pytest.raises(InvariantError, match="segment 1, token 1: turn 0 appears a second time"):
        check_invariants(trajectory(segment(), again))


@pytest.mark.parametrize(
    "damaged",
    [
        trajectory(segment(fork_reason=ForkReason.COMPACTION)),
        trajectory(segment(), segment()),
        trajectory(segment(), fork_counts={}),
        trajectory(segment(), finish_reasons=[FinishReason.STOP]),
    ],
)
def test_reasons_and_turns_must_add_up(damaged):
    with pytest.raises(InvariantError):
        check_invariants(damaged)


@pytest.mark.parametrize(
    "lineage",
    [
        {"parent": 1, "shared_prefix": 0},
        {"parent": 0, "shared_prefix": 2},
        {"parent": None, "shared_prefix": 1},
        {"parent": 0, "shared_prefix": -1},
    ],
)
def test_a_segment_begins_as_its_parent_for_as_long_as_it_says(lineage):
    child = {
        "token_ids": [5, 9, 7, 8, 9],
        "turn_ids": [-1, 2, 2, -1, 3],
        "fork_reason": ForkReason.COMPACTION,
    }
    check_invariants(trajectory(segment(), segment(**child, parent=0, shared_prefix=1)))
    with pytest.raises(InvariantError, match="parent"):
        check_invariants(trajectory(segment(), segment(**child, **lineage)))


def test_tokens_shared_with_the_parent_segment_are_not_sampled_again():
    child = segment(turn_ids=[-1, 2, 2, -1, 3], fork_reason=ForkReason.COMPACTION, parent=0, shared_prefix=3)
    with pytest.raises(InvariantError, match="sampled in both"):
        check_invariants(trajectory(segment(), child))
