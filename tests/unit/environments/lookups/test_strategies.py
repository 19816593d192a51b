"""How an orchestrator divides the work decides what it gets: the tables of both tasks, by scripts that never err."""

import random
import re
from itertools import pairwise

import pytest

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.parallel.tools import RESULT_RULE
from rollout_service.engines.shipped import policy_folder
from rollout_service.environments.builtin.lookups import READ
from rollout_service.environments.builtin.pointers import environment as pointers
from rollout_service.environments.builtin.pointers import make_problem as make_pointers
from rollout_service.environments.builtin.split import environment as split
from rollout_service.environments.builtin.split import make_problem as make_split
from rollout_service.testing.scripted_policy import call, turn
from rollout_service.tokens import ChatRenderer
from tests.support.episodes import episode_of
from tests.support.sub_agents import ScriptedSubagents
from tests.support.turns import called

NUMBER = re.compile(r"\d\d(\+\d\d)*")


def read(key):
    return call("read", key=key)


def assign(*names):
    return call("assign_task", agent="a", prompt=" ".join(names))


CREATE = call("create_subagent", name="a", system_prompt="Read.")


def results(messages):
    return [message.content for message in messages if message.role == "tool"]


def answer(count):
    """Return a turn that adds the last numbers that were read, as many as there are values."""

    def play(messages):
        numbers = [text for text in results(messages) if NUMBER.fullmatch(text)]
        return turn("", call("finish", answer="+".join("+".join(numbers).split("+")[:count])))

    return play


def read_the_pointer(messages):
    return turn("", read(results(messages)[-1]))


def subagent(_agent):
    """Yield the turns of a sub-agent: it reads each name, and what that holds unless it is a number."""
    pending, values = [], []
    begun = False

    def play(messages):
        nonlocal begun
        if not begun:
            begun = True
            pending.extend(messages[-1].content.split())
        elif NUMBER.fullmatch(messages[-1].content):
            values.append(messages[-1].content)
        elif messages[-1].role == "tool":
            pending.insert(0, messages[-1].content)
        return turn("", read(pending.pop(0))) if pending else turn(f"<result>{'+'.join(values)}</result>")

    while True:
        yield play


def failing(_agent):
    yield turn("", read("nowhere"))
    yield "It is lost."


async def run(environment, problem, script, workers=subagent):
    instance = {**problem}
    environment.check(instance)
    episode = episode_of(environment, instance, script, subagents=ScriptedSubagents(workers))
    reason = await environment.run(episode)
    return reason, episode, await environment.evaluate(episode)


def direct(keys):
    for key in keys:
        yield turn("", read(key))
        yield read_the_pointer
    yield answer(len(keys))


def waves(keys, width):
    """Assign `width` keys a turn."""
    for start in range(0, len(keys), width):
        yield turn("", *([CREATE] if start == 0 else []), *map(assign, keys[start : start + width]))
    yield answer(len(keys))


def always(keys, count):
    """Assign `count` tasks in one turn, keys again and again."""
    yield turn("", CREATE, *(assign(keys[i % len(keys)]) for i in range(count)))
    yield answer(len(keys))


@pytest.mark.parametrize(
    ("strategy", "steps", "rewards"),
    [
        (direct, (5, 7, 9), (1, 0, 0)),
        (lambda keys: waves(keys, 1), (9, 13, 17), (0, 0, 0)),
        (lambda keys: waves(keys, 2), (5, 9, 9), (1, 0, 0)),
        (lambda keys: waves(keys, 4), (5, 5, 5), (1, 1, 1)),
        (lambda keys: always(keys, 4), (5, 5, 5), (1, 1, 1)),
        (lambda keys: always(keys, 8), (8, 8, 8), (0, 0, 0)),
    ],
    ids=["all direct", "one a turn", "two a turn", "k in one turn", "always 4", "always 8"],
)
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_pointers_pays_for_width(strategy, steps, rewards, size):
    problem = make_pointers(random.Random(size), size)
    reason, episode, score = await run(pointers, problem, strategy(problem["names"]))
    needed, reward = steps[size - 2], rewards[size - 2]
    assert score.reward == reward
    if reward:
        assert reason is StopReason.FINISHED
        assert episode.work.scheduled_steps == needed
    else:
        assert needed > 6
        assert reason is StopReason.MAX_CRITICAL_STEPS


def index_then(items, *turns):
    yield turn("", call("index"))
    yield from turns
    yield answer(len(items))


def split_among(items, count):
    size, more = divmod(len(items), count)
    ends = [n * size + min(n, more) for n in range(count + 1)]
    shares = [items[begin:end] for begin, end in pairwise(ends)]
    return index_then(items, turn("", CREATE, *(assign(*share) for share in shares if share)))


def uneven(items):
    rest = len(items) - 3
    shares = [items[:rest], *([item] for item in items[rest:])]
    return index_then(items, turn("", CREATE, *(assign(*share) for share in shares)))


def blind(items):
    yield turn("", CREATE, assign("nothing"))
    yield from index_then(items, *(turn("", read(item)) for item in items))


@pytest.mark.parametrize(
    ("strategy", "rewards"),
    [
        (lambda items: index_then(items, *(turn("", read(item)) for item in items)), (1, 0, 0)),
        (lambda items: split_among(items, 1), (0, 0, 0)),
        (lambda items: split_among(items, 2), (1, 0, 0)),
        (lambda items: split_among(items, 3), (1, 1, 0)),
        (lambda items: split_among(items, 4), (1, 1, 1)),
        (uneven, (1, 0, 0)),
        (lambda items: split_among(items, 8), (1, 0, 0)),
        (blind, (0, 0, 0)),
    ],
    ids=["direct", "1 agent", "2", "3", "4", "4, uneven", "8", "before the index"],
)
@pytest.mark.parametrize("size", [4, 6, 8])
async def test_split_pays_for_order_and_balance(strategy, rewards, size):
    problem = make_split(random.Random(size), size)
    _, _, score = await run(split, problem, strategy(problem["names"]))
    assert score.reward == rewards[(4, 6, 8).index(size)]


async def test_reads_beyond_the_budget_do_not_count_though_the_answer_comes_with_them():
    problem = make_pointers(random.Random(0), 4)
    names, cells = problem["names"], problem["cells"]
    right = "+".join(cells[cells[name]] for name in names)
    script = [
        turn("", *map(read, names)),
        turn("", *(read("A") for _ in range(4)), call("finish", answer=right)),
    ]
    _, _, score = await run(pointers, problem, script)
    assert (score.reward, score.parts["right"], score.parts["in_time"]) == (0.0, 1.0, 0.0)


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer.load(policy_folder("parl-base"))


@pytest.mark.parametrize("environment", [pointers, split], ids=["pointers", "split"])
def test_the_prompt_is_short(renderer, environment):
    messages = environment.messages(environment.dataset()[0])
    assert len(renderer.render(messages, environment.tool_definitions())) < 64


def test_the_prompt_of_a_subagent_is_short(renderer):
    system = Message(role="system", content=f"Follow the pointer.\n\n{RESULT_RULE}")
    messages = [system, Message(role="user", content="A")]
    assert len(renderer.render(messages, [READ.definition])) < 32


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (called("read", key="Q7"), 6),
        (called("assign_task", agent="a", prompt="Q"), 5),
        (called("create_subagent", name="a", system_prompt="Follow the pointer."), 3),
        (called("finish", answer="37+12"), 9),
        ("<result>37</result>", 4),
    ],
)
def test_a_call_is_a_few_tokens(renderer, text, most):
    ids = renderer.encode(text)
    assert len(ids) <= most
    assert renderer.decode(ids) == text
