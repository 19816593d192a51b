"""Templates of prompts and multi-turn declarations are filled from a task, or refused by name."""

import math
from collections.abc import Sequence
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, InvalidFieldError
from rollout_service.base.templates import PromptTemplate, require_plain
from rollout_service.environments.bridges.turns import Consequence, score_turns, take_turns
from rollout_service.episodes import ContextFullError, Episode
from rollout_service.testing.scripted_policy import ScriptedTurn, turn
from tests.support.episodes import scripted_episode


def render(source, instance):
    return PromptTemplate(source, where="the prompt").render(instance)


@settings(deadline=None)
@given(st.text() | st.sampled_from(["{{ 7 * 7 }}", "{% raw %}", "{# a #}", "{{ instance.secret }}", "<b>&"]))
def test_an_instance_is_never_read_as_a_template(text):
    instance = {"question": text, "secret": "gold"}
    assert render("Q: {{ instance.question }}", instance) == f"Q: {text}"


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("{{ instance.word }}", "instance.word"),
        ("{{ instance['word'] }}", "instance.word"),
        ("{{ instance.inner.name }}", "instance.inner.name"),
        ("{{ instance.list[1].name }}", "instance.list[1].name"),
        ("{% for x in instance.items_missing %}{% endfor %}", "instance.items_missing"),
        ("{% if instance.word == 'a' %}{% endif %}", "instance.word"),
        ("{{ instance.word | upper }}", "instance.word"),
        ("{{ instance.word.deeper }}", "instance.word"),
    ],
)
def test_a_missing_field_is_named(source, path):
    with pytest.raises(InvalidFieldError) as caught:
        render(source, {"inner": {"a": 1}, "list": [{"name": "a"}, {"other": "b"}], "question": "q"})
    [field] = caught.value.fields
    assert field.path == path
    assert "is missing, and the prompt uses it" in field.message


def test_a_field_may_be_left_to_the_instance():
    source = "{% if instance.hint is defined %}Hint: {{ instance.hint }}{% endif %}{{ instance.n | default(3) }}"
    assert render(source, {}) == "3"
    assert render(source, {"hint": "h", "n": 1}) == "Hint: h1"


def test_fields_with_names_of_methods_are_fields():
    assert render("{{ instance.items }} {{ instance.copy }}", {"items": "a", "copy": "b"}) == "a b"


@pytest.mark.parametrize(
    "source",
    [
        "{{ instance.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ instance.clear() }}",
        "{{ instance.update({'a': 1}) }}",
        "{{ 1 / 0 }}",
        "{{ instance.n + 'a' }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_forbidden_template_operation_is_an_error_of_the_field(source):
    instance = {"n": 1}
    with pytest.raises(InvalidFieldError):
        render(source, instance)
    assert instance == {"n": 1}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "takes more than 0.25 s"),
        ("{% for a in range(9999) %}{{ instance.long }}{% endfor %}", "more than 4,194,304 characters"),
        ("{{ (instance.long * 9999) | upper }}", "more than 4,194,304 characters"),
        ("{{ [instance.list * 99999] | first | length }}", "more than 100,000 items"),
    ],
)
def test_a_costly_template_is_an_error_of_the_field(source, message):
    started = thread_time()
    with pytest.raises(InvalidFieldError, match=message):
        render(source, {"long": "x" * 1000, "list": [1, 2]})
    assert thread_time() - started < 5


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("{{ 'a' * 10 ** 10 }}", "`mul`"),
        ("{{ 9 ** 9 ** 9 }}", "`pow`"),
        ("{{ '%9999999999d' % 1 }}", "`mod`"),
        ("{{ instance.a % 1 }}", "`mod`"),
        ("{{ instance.a.center(10 ** 10) }}", "`call`"),
        ("{{ instance.a ~ instance.a }}", "`concat`"),
        ("{{ instance.a + instance.a }}", "a sum of two fields"),
        ("{% set a = instance.a %}", "`assign`"),
        ("{% macro a() %}{{ a() }}{% endmacro %}", "`macro`"),
        ("{% for x in instance.a recursive %}{{ x }}{% endfor %}", "a recursive loop"),
        ("{{ [instance.a, instance.a] | join }}", "a list of fields"),
        ("{{ (instance.a, instance.a) }}", "a list of fields"),
        ("{{ {'a': instance.a} }}", "`dict`"),
        ("{{ instance.a | center(9999) }}", "the filter `center`"),
        ("{{ instance.a | map('center', 9999) }}", "the filter `map`"),
        ("{{ instance.a | indent(9) }}", "this argument of the filter `indent`"),
        ("{{ instance.a | join(instance.b) }}", "this argument of the filter `join`"),
        ("{{ instance.a | tojson(indent=1) }}", "this argument of the filter `tojson`"),
        ("{{ instance.a | indent(*instance.b) }}", "the filter `indent`"),
        ("{% filter upper %}a{% endfilter %}", "`filterblock`"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "not a valid template"),
    ],
)
def test_a_template_inside_an_image_is_plain(source, used):
    with pytest.raises(ConfigurationError, match="the prompt") as caught:
        require_plain(source, where="the prompt")
    assert used in str(caught.value)


def test_a_plain_template_has_fields_conditions_loops_and_filters():
    source = (
        "{% if instance.hint is defined and instance.n > -1 %}{{ instance.hint | default('no hint known') }}{% endif %}"
        "{% for key, item in instance.rows | items %}{{ loop.index + 1 }}. {{ key | upper }}: {{ item | join(', ') }}"
        "{{ ' (first)' if key in ['a', 'c'] else '' }}\n{% endfor %}{# note #}{% raw %}{{ }}{% endraw %}"
    )
    require_plain(source, where="the prompt")
    rows = {"a": ["x", "y"], "b": ["z"]}
    assert render(source, {"hint": "Hint. ", "n": 1, "rows": rows}) == "Hint. 2. A: x, y (first)\n3. B: z\n{{ }}"


@pytest.mark.parametrize("source", ["{{ instance", "{% for %}", "{{ question }}", "{{ instance.a | nonsense }}"])
def test_a_template_that_cannot_work_is_refused_at_once(source):
    with pytest.raises(ConfigurationError, match="the prompt"):
        PromptTemplate(source, where="the prompt")


NULLS = {"hint": None, "info": {"hint": None}, "list": ["a", None], "rows": [{"n": None}], "yes": True}


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("{{ instance.hint }}", "instance.hint"),
        ("{{ instance['hint'] }}", "instance.hint"),
        ("{{ instance.info.hint }}", "instance.info.hint"),
        ("{{ instance.info.hint | upper }}", "instance.info.hint"),
        ("{{ instance.hint | default('x') }}", "instance.hint"),
        ("{{ 'a' ~ instance.hint }}", "instance.hint"),
        ("{{ '%s' | format(instance.hint) }}", "instance.hint"),
        ("{{ instance.hint.deeper }}", "instance.hint"),
        ("{{ instance.hint[0] }}", "instance.hint"),
        ("{% for row in instance.rows %}{{ row.n }}{% endfor %}", "instance.rows[0].n"),
        ("{% set x = instance.hint %}{{ x }}", "instance.hint"),
        ("{{ instance.list[1] }}", "instance.list.1"),
        ("{% for x in instance.list %}{{ x }}{% endfor %}", "instance"),
        ("{{ none }}", "instance"),
    ],
)
def test_a_null_is_not_written_as_a_word_of_python(source, path):
    with pytest.raises(InvalidFieldError, match="null") as caught:
        render(source, NULLS)
    assert [field.path for field in caught.value.fields] == [path]
    assert "or ''" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ instance.hint or '' }}{{ instance.hint | default('x', true) }}", "x"),
        ("{% if instance.hint %}a{% else %}b{% endif %}", "b"),
        ("{{ 1 if instance.hint is none else 2 }}{{ 1 if instance.yes is none else 2 }}", "12"),
        ("{{ 1 if instance.hint == none else 2 }}{{ 1 if none == instance.hint else 2 }}", "11"),
        ("{{ 1 if instance.hint != instance.yes else 2 }}", "1"),
        ("{{ instance.hint | tojson }} {{ instance.info | tojson }}", 'null {"hint": null}'),
        ("{{ instance.rows | map(attribute='n') | list }}", "[null]"),
    ],
)
def test_a_template_may_ask_whether_a_field_is_null(source, text):
    assert render(source, NULLS) == text


def test_values_are_written_as_json():
    instance = {"yes": True, "list": ["é", 1, None], "object": {"a": False}, "text": "True", "number": 1.5}
    source = "{{ instance.yes }} {{ instance.list }} {{ instance.object }} {{ instance.text }} {{ instance.number }}"
    assert render(source, instance) == 'true ["é", 1, null] {"a": false} True 1.5'


BEGIN = [Message(role="user", content="Play.")]


class Scripted:
    """Gives its replies in order, and keeps the actions."""

    def __init__(self, replies: Sequence[Consequence | EnvironmentFailedError]) -> None:
        self.actions: list[str] = []
        self._replies = iter(replies)

    async def step(self, action: str) -> Consequence:
        self.actions.append(action)
        reply = next(self._replies)
        if isinstance(reply, EnvironmentFailedError):
            raise reply
        return reply


def episode(script: Sequence[ScriptedTurn], **limits: float) -> Episode:
    return scripted_episode(script, limits=limits)


async def test_replies_are_messages_and_rewards_add_up():
    played = episode(["left", "right"])
    partner = Scripted(
        [
            Consequence(text="a wall", reward=-0.5),
            Consequence(text="out", reward=2.0, done=True, parts={"length": 2.0}),
        ]
    )
    assert await take_turns(played, BEGIN, partner) is StopReason.FINISHED
    assert partner.actions == ["left", "right"]
    assert [message.content for message in played.policy.messages] == ["Play.", "left", "a wall", "right"]
    score = score_turns(played)
    assert score.reward == 1.5
    assert score.parts == {"turns": 2.0, "finished": 1.0, "turn_1": -0.5, "turn_2": 2.0, "length": 2.0}


@pytest.mark.parametrize(
    ("script", "limits", "why"),
    [
        (["a", "b"], {"max_turns": 1}, StopReason.MAX_TURNS),
        (["aaaa", "b"], {"max_tokens": 4}, StopReason.MAX_TOKENS),
        (["a", ContextFullError("full")], {}, StopReason.CONTEXT_FULL),
        (["a", turn("b", truncated=True)], {}, StopReason.TRUNCATED),
    ],
)
async def test_a_limit_keeps_what_was_earned(script, limits, why):
    played = episode(script, **limits)
    partner = Scripted([Consequence(text="go on", reward=0.25), Consequence(text="never reached", reward=100.0)])
    assert await take_turns(played, BEGIN, partner) is why
    assert score_turns(played).reward == 0.25
    assert score_turns(played).parts["finished"] == 0.0


async def test_a_failure_of_the_other_side_is_no_reward():
    with pytest.raises(EnvironmentFailedError, match="no game"):
        await take_turns(episode(["a"]), BEGIN, Scripted([EnvironmentFailedError("no game")]))


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=100))
async def test_the_reward_is_the_sum_whatever_is_shown(rewards):
    replies = [
        Consequence(text="", reward=reward, done=number == len(rewards)) for number, reward in enumerate(rewards, 1)
    ]
    played = episode(["x"] * len(rewards), max_turns=len(rewards))
    await take_turns(played, BEGIN, Scripted(replies))
    score = score_turns(played)
    assert math.isclose(score.reward, sum(rewards), abs_tol=1e-9)
    assert score.parts["turns"] == len(rewards)
    assert len(score.parts) <= 66
