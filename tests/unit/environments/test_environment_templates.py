"""An instance is data in a prompt, whatever braces it contains."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.errors import ConfigurationError, InvalidFieldError
from rollout_service.templates import PromptTemplate


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
    source = (
        "{% if instance.hint is defined %}Hint: {{ instance.hint }}{% endif %}{{ instance.n | default(3) }}"
    )
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
    "source", ["{{ instance", "{% for %}", "{{ question }}", "{{ instance.a | nonsense }}"]
)
def test_a_template_that_cannot_work_is_refused_at_once(source):
    with pytest.raises(ConfigurationError, match="the prompt"):
        PromptTemplate(source, where="the prompt")
