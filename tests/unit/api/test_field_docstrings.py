"""The docstrings below fields describe them in JSON schemas, though nothing reads them as classes are defined."""

from pydantic import BaseModel, Field

from api_schemas.base import WireModel, field_docstrings


class Parent(WireModel):
    kept: int
    """In two
    lines."""
    redefined: int
    """The parent's."""
    bare: int
    stated: int = Field(description="The field's own.")
    """The docstring."""
    renamed: int = Field(alias="other")
    """It has an alias."""


class Child(Parent):
    class Inner(WireModel):
        value: int
        """In a class within a class."""

    redefined: int
    inner: Inner
    """A model of its own."""


def described(model: type[BaseModel]) -> dict[str, str | None]:
    return {name: one.get("description") for name, one in model.model_json_schema()["properties"].items()}


def test_a_schema_has_the_docstrings_of_fields():
    assert described(Parent) == {
        "kept": "In two\nlines.",
        "redefined": "The parent's.",
        "bare": None,
        "stated": "The field's own.",
        "other": "It has an alias.",
    }
    assert described(Child.Inner) == {"value": "In a class within a class."}


def test_a_field_that_is_defined_again_has_its_own_docstring_or_none():
    inherited = {name: text for name, text in field_docstrings(Parent).items() if name != "redefined"}
    assert field_docstrings(Child) == inherited | {"inner": "A model of its own."}
    assert described(Child)["redefined"] is None


def test_classes_within_functions_are_told_apart():
    class Parent(WireModel):
        kept: int
        """In a function."""

    assert field_docstrings(Parent) == {"kept": "In a function."}
