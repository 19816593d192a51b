"""Looks in an agent's sandbox for what only the grader should know: its files, and the answers in the instance.

It searches as the agent could: with a program inside, as the agent's user, after `init`. Texts that are too short to
tell are not searched for, and folders of the system's programs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from sandboxes import Sandbox

SECRET_WORDS = ("answer", "solution", "expected", "test", "hidden", "gold", "reference", "target", "patch")
"""A field of an instance with one of these words in its name is taken for the grader's."""
SHORTEST, LONGEST = 8, 400
SHORTEST_LINE = 24
"""Shorter lines of a grader's file occur by chance."""
LINES = 3
SEARCH_SECONDS = 60.0
LEFT_OUT = (
    "proc",
    "sys",
    "dev",
    "usr",
    "bin",
    "sbin",
    "lib",
    "lib64",
    "boot",
    ".singularity.d",
    "site-packages",
)
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Needle:
    """A text to search for."""

    what: str
    """Where it comes from."""
    text: str


def needles(instance: Mapping[str, JsonValue], private: Mapping[str, str], prompt: str) -> list[Needle]:
    """Return the texts to search for; a text of the prompt itself is not one."""
    found = list(_of_instance(dict(instance), "instance"))
    for path, text in private.items():
        lines = {line.strip() for line in text.splitlines()}
        longest = sorted((line for line in lines if SHORTEST_LINE <= len(line) <= LONGEST), key=len)[-LINES:]
        found += [Needle(f"the grader's file {path}", line) for line in longest]
    return [needle for needle in found if needle.what.startswith("instance") or needle.text not in prompt]


def in_prompt(found: list[Needle], prompt: str) -> Iterator[str]:
    """Yield the leaks of the prompt itself."""
    for needle in found:
        if needle.text in prompt:
            yield f"the prompt holds {needle.what}"


async def in_sandbox(sandbox: Sandbox, found: list[Needle]) -> list[str]:
    """Return the files that the agent can read and that hold one of the texts."""
    leaks: list[str] = []
    options = [f"--exclude-dir={name}" for name in LEFT_OUT]
    whats = dict.fromkeys(needle.what for needle in found)
    isolated = sandbox.workdir == sandbox.spec.workdir
    root = "/" if isolated else sandbox.workdir  # without isolation, the rest is the host's
    for what in whats:
        patterns = "\n".join(needle.text for needle in found if needle.what == what)
        result = await sandbox.exec(
            ["grep", "-rlIF", "-m1", *options, "-f", "-", "--", root],
            stdin=patterns.encode(errors="replace"),
            cwd="/",
            timeout=SEARCH_SECONDS,
        )
        if result.exit_code == 127:
            return ["this image has no grep, so its files were not searched"]
        paths = result.stdout.decode(errors="replace").splitlines()
        leaks += [f"{path} holds {what}" for path in paths[:SHOWN]]
    return leaks


def _of_instance(value: JsonValue, path: str, *, secret: bool = False) -> Iterator[Needle]:
    """Yield the long enough texts of an instance below a field that is taken for the grader's."""
    if isinstance(value, dict):
        for name, item in value.items():
            is_secret = secret or any(word in name.lower() for word in SECRET_WORDS)
            yield from _of_instance(item, f"{path}.{name}", secret=is_secret)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _of_instance(item, f"{path}[{at}]", secret=secret)
    elif secret and isinstance(value, str):
        lines = [line.strip() for line in value.splitlines()]
        for line in sorted((line for line in lines if SHORTEST <= len(line) <= LONGEST), key=len)[-LINES:]:
            yield Needle(path, line)
