"""The base of every wire model: unknown fields are refused, values are immutable."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

RolloutId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
"""An identifier that a caller may choose: 1-128 letters, digits, `.`, `_`, `:` or `-`."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A name of an environment, a pool or an image: 1-64 letters, digits, `.`, `_` or `-`."""


class WireModel(BaseModel):
    """A frozen model that refuses unknown fields and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
