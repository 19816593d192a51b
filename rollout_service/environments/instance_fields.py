"""Instances as models: a wrong field is named by its path."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError

M = TypeVar("M", bound=BaseModel)


def read_instance(model: type[M], instance: dict[str, JsonValue], *, hint: str = "") -> M:
    """Return an instance as a model.

    Raises:
        InvalidFieldError: A field is missing or wrong; the paths start at `instance`.
    """
    try:
        return model.model_validate(instance)
    except ValidationError as error:
        fields = [
            FieldError(path=".".join(["instance", *map(str, item["loc"])]), message=item["msg"])
            for item in error.errors(include_url=False, include_input=False)
        ]
        raise InvalidFieldError(fields, hint=hint) from error
