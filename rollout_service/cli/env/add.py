"""Adds an environment's folder to the settings file, whose other lines stay as they are."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from rollout_service.cli.common import CommandError
from rollout_service.cli.files import written

KEY = "environments"
_TABLE = re.compile(r"^\s*\[", re.MULTILINE)
_STARTS = re.compile(rf"^{KEY}[ \t]*=[ \t]*\[", re.MULTILINE)


def add_to_settings(file: Path, path: Path) -> bool:
    """Add a path to `environments` in a settings file, which is made if missing; return False if it is there."""
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error
    known = table.get(KEY, [])
    if not isinstance(known, list):
        raise CommandError(f"{file}: `{KEY}` is not a list", hint=f"Make it one, and add {str(path)!r}.")
    if str(path) in known:
        return False
    changed = _with(text, [*map(str, known), str(path)])
    if _loaded(changed) != table | {KEY: [*known, str(path)]}:
        raise CommandError(
            f"{file}: its list of {KEY} cannot be changed safely", hint=f"Add {json.dumps(str(path))} to it."
        )
    with written(file.resolve(), hint="Free space, or name another file with --config.") as write:
        write(changed.encode())
    return True


def _with(text: str, paths: list[str]) -> str:
    """Return the text with this list. The caller must check it, since only usual spellings are found."""
    line = f"{KEY} = [{', '.join(json.dumps(path, ensure_ascii=False) for path in paths)}]"
    top = found.start() if (found := _TABLE.search(text)) else len(text)
    starts = _STARTS.search(text, 0, top)
    if starts is None:
        return f"{line}\n{text}"
    for end in re.finditer(r"\]", text[starts.end() :]):
        stop = starts.end() + end.end()
        if _loaded(text[starts.start() : stop]) is not None:
            return text[: starts.start()] + line + text[stop:]
    return text


def _loaded(text: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
