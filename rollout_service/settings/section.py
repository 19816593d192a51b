"""The base of every table of the settings."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)
