"""Bodies and queries that are not valid are refused with the place of each error, and in words that fit a screen."""

import json
import types
from collections.abc import Iterator
from datetime import datetime
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, Strict, ValidationError

from api_schemas.errors import Boundary, ErrorInfo, sentences
from api_schemas.runs import RunRequest
from api_schemas.trajectories import Message
from rollout_service.base import strict_json
from rollout_service.base.validation import describe_problems
from rollout_service.server.api import routes

HALF = "\ud83d"


@pytest.mark.parametrize(
    "model",
    [
        Message(role="tool", content=f"name {HALF}, {HALF}\ude00"),
        ErrorInfo(code="c", boundary=Boundary.ENVIRONMENT, message=f"name {HALF}, {HALF}\ude00"),
    ],
)
def test_a_text_with_half_of_a_surrogate_pair_can_be_sent(model):
    assert "name \ufffd, \U0001f600" in type(model).model_validate_json(model.model_dump_json()).model_dump().values()


SOURCE = {"kind": "file", "path": "/x.jsonl", "environment": "calc"}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"group_sise": 8}, "group_sise: unknown field; did you mean group_size?"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature: unknown field; did you mean temperature?"),
        ({"source": SOURCE | {"shufle": True}}, "source.file.shufle: unknown field; did you mean shuffle?"),
        ({"filters": [{"nam": "x"}]}, "filters.0.nam: unknown field; did you mean name?"),
        ({"zzz": 1}, "zzz: unknown field"),
        ({"min_usable": 9, "group_size": 2}, "min_usable may not exceed group_size"),
    ],
)
def test_a_problem_names_the_path_and_the_nearest_field(document, said):
    with pytest.raises(ValidationError) as caught:
        RunRequest.model_validate({"source": SOURCE, "batch_size": 1} | document)
    assert said in describe_problems(caught.value, RunRequest)


def test_invalid_json_is_reported():
    with pytest.raises(ValidationError) as caught:
        RunRequest.model_validate_json("{")
    assert describe_problems(caught.value, RunRequest)[0].startswith("not valid JSON: ")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("it is used by the process 7", "it is used by the process 7. Stop it."),
        ("it is used.", "it is used. Stop it."),
        ("there is no x; did you mean y?", "there is no x; did you mean y? Stop it."),
    ],
)
def test_a_hint_follows_the_end_of_a_sentence(message, said):
    assert sentences(message, "Stop it.") == said
    assert sentences(message, "") == message


def bodies() -> set[Any]:
    modules = [import_module(f"{routes.__name__}.{found.name}") for found in iter_modules(routes.__path__)]
    routers = [module.router for module in modules if hasattr(module, "router")]
    fields = [route.body_field for router in routers for route in router.routes if isinstance(route, APIRoute)]
    return {field.field_info.annotation for field in fields if field}


def lax_fields(annotation: Any, metadata: tuple[Any, ...], where: str, seen: set[Any]) -> Iterator[str]:
    """Yield the paths of numbers, booleans and times that pydantic would convert."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from lax_fields(inner[0], (*metadata, *inner[1:]), where, seen)
    elif annotation in (int, float, bool, datetime):
        if not any(isinstance(each, Strict | BeforeValidator) for each in metadata):
            yield f"{where}: {annotation.__name__}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in seen:
            seen.add(annotation)
            for name, field in annotation.model_fields.items():
                yield from lax_fields(field.annotation, tuple(field.metadata), f"{annotation.__name__}.{name}", seen)
    elif origin is not Literal:
        kept = metadata if origin in (Union, types.UnionType) else ()
        for each in inner:
            yield from lax_fields(each, kept, where, seen)


def test_scalars_of_requests_are_not_converted():
    seen: set[Any] = set()
    assert [lax for body in bodies() for lax in lax_fields(body, (), str(body), seen)] == []
    assert len(seen) > 20


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@pytest.mark.slow
@given(VALUES)
def test_what_can_be_stored_is_read_as_it_is(value):
    text = json.dumps(value)
    assert strict_json.parse(text.encode()) == value


@pytest.mark.parametrize(
    "number", ["1e309", "-1E+400", "1e0309", '[1, {"a": 2e999}]', "1" + "0" * 309 + ".5", "NaN", "-Infinity"]
)
def test_numbers_beyond_the_range_are_refused(number):
    with pytest.raises(ValueError):
        strict_json.parse(number.encode())


def test_a_text_that_looks_like_such_a_number_is_a_text():
    assert strict_json.parse(b'["1e999", 1.5e300]') == ["1e999", 1.5e300]


@pytest.mark.parametrize("text", ['"\\ud800"', "[" * 101 + "]" * 101, "{", ""])
def test_other_documents_that_cannot_be_stored_are_refused(text):
    with pytest.raises(ValueError):
        strict_json.parse(text.encode())


@given(VALUES, st.integers(0, 8))
def test_commas_and_brackets_are_counted_outside_of_texts(value, most):
    document = json.dumps(value).encode()
    plain = json.dumps(_without_texts(value))
    assert strict_json.has_more(document, b",{[", most) == (sum(map(plain.count, ",{[")) > most)


def _without_texts(value: object) -> object:
    if isinstance(value, str):
        return ""
    if isinstance(value, list):
        return [_without_texts(item) for item in value]
    if isinstance(value, dict):
        return {str(number): _without_texts(item) for number, item in enumerate(value.values())}
    return value


@given(st.binary(max_size=40), st.integers(0, 8))
def test_any_bytes_are_counted(document, most):
    assert not strict_json.has_more(document, b",{[", max(most, len(document)))
    strict_json.has_more(document, b",{[", most)
