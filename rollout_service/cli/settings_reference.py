"""The reference of all settings as Markdown, generated from their fields, so it is never behind the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, Url

from rollout_service.settings import Settings
from rollout_service.settings.keys import ANY_NAME, Key, Table, iter_tables
from rollout_service.settings.sources import FLAGS, OTHER_VARIABLES, variable_name

HEAD = """# Settings
<!-- Written by `rollout-service config docs > docs/settings.md`; change the docstrings in the code instead. -->

Set a key in `rollout.toml`, as a variable `ROLLOUT_*`, or, for the most common keys, as a flag of `serve`. Flags win
over variables, and variables over the file. In a variable, `__` separates a table from its key: `[pipeline]
init_workers` is `ROLLOUT_PIPELINE__INIT_WORKERS`. Lists and whole tables are JSON in a variable:
`ROLLOUT_KEYS='["..."]'`, `ROLLOUT_POOLS='{"judge": {"max_in_flight": 64}}'`. A list without tables may also be values
with commas between them, `ROLLOUT_ALLOWED_HOSTS=a.example.com,b.example.com`, and a table of texts pairs of them,
`ROLLOUT_EMBEDDED__POOLS=judge=calc-base`.

The file is `rollout.toml` in the working folder, or the one that `--config` or `ROLLOUT_CONFIG` names. An unknown key
or variable is refused, with the closest known one. `rollout-service config show` prints every value with its source; it
takes the flags of `serve`."""
NAMES: dict[Any, str] = {
    str: "text",
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    Path: "path",
    SecretStr: "text (secret)",
    Url: "URL",
}
BOUNDS = {"ge": ">= ", "gt": "> ", "le": "<= ", "lt": "< "}


def reference() -> str:
    seen = set()
    parts = [HEAD]
    for table in iter_tables(Settings):
        identity = (table.path, table.tag, table.repeated)
        if table.keys and identity not in seen:
            seen.add(identity)
            parts.append("\n".join(_section(table)))
    parts.append("\n".join(_other_variables()))
    return "\n\n".join(parts) + "\n"


def _section(table: Table) -> Iterator[str]:
    name = ".".join(table.path)
    title = f"[[{name}]]" if table.repeated else f"[{name}]"
    yield f"## `{title}`" + (f" with `{table.tag}`" if table.tag else "") if name else "## Top level"
    if name:
        yield f"{table.about}\n"
    settable = not table.repeated and ANY_NAME not in table.path
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in table.keys:
        yield f"| {_names(key, settable=settable)} | {_type(key.field)} | {_default(key.field)} | {_meaning(key)} |"


def _names(key: Key, *, settable: bool) -> str:
    names = [f"`{key.path[-1]}`"]
    if settable:
        names.append(f"`{variable_name(key.dotted)}`")
    if key.dotted in FLAGS:
        names.append(f"`{FLAGS[key.dotted]}`")
    return "<br>".join(names)


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign}{getattr(rule, name):,}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    if annotation in NAMES:
        return NAMES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_name(one) for one in arguments if one is not NoneType)
    if origin is list:
        return f"list of {_plural(arguments[0])}"
    if origin is dict:
        return f"table of {_plural(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    return "URL" if "Url" in str(annotation) else str(getattr(annotation, "__name__", annotation))


def _plural(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "tables"
    return {Path: "paths", SecretStr: "texts (secret)"}.get(annotation, f"{_name(annotation)}s")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def _meaning(key: Key) -> str:
    """Put the description on one line, with "left out" for `None`, which a file cannot contain."""
    text = " ".join(key.about.split())
    text = re.sub(r"(^|[.:] )None\b", r"\1Left out", text)
    return re.sub(r"\bNone\b", "left out", text).replace("|", r"\|")


def _other_variables() -> Iterator[str]:
    yield "## Other variables"
    yield "These also begin with `ROLLOUT_`, but are not settings of the server.\n"
    yield "| variable | meaning |"
    yield "|---|---|"
    for name, meaning in sorted(OTHER_VARIABLES.items()):
        yield f"| `{name}` | {meaning} |"
