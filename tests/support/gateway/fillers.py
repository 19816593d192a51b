"""Makes fixtures of recorded traffic: structure, ids and names of tools stay, every text of an agent is replaced.

    python -m tests.support.gateway.fillers RECORDINGS [NAME ...]

A filler is as long as its text, with the same line breaks and spaces around, and equal for equal texts. What the
scripted model answered is the project's own and stays, also where the agent echoes it, since its spelling is what the
tests are about.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from rollout_service.gateway.dialects.google.requests import sign
from tests.support.gateway.recordings import FOLDER, LISTS, PREVIOUS, SAME, expand

PROMPT = "Create a file hello.txt which contains the word hi, then show it."
BILLING = "x-anthropic-billing-header:"
_WORDS = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "inlet",
    "jasper",
    "krill",
    "lotus",
)
_NAMES = frozenset(
    [
        "type",
        "role",
        "id",
        "name",
        "model",
        "call_id",
        "tool_call_id",
        "tool_use_id",
        "item_id",
        "status",
        "namespace",
        "signature",
        "encrypted_content",
        "thoughtSignature",
        "user_id",
        "session_id",
        "prompt_cache_key",
        "effort",
        "display",
        "keep",
        "mode",
        "verbosity",
        "tool_choice",
        "enum",
        "required",
        "syntax",
        "execution",
        "thinkingLevel",
        "tool_name",
        "include",
        "format",
        "summary",
        "reasoning_effort",
        "search_content_types",
        "stop",
        "finish_reason",
        "finishReason",
        "stop_reason",
        "object",
        "responseId",
        "modelVersion",
    ]
)
"""Fields whose values are names; `summary` and `format` hold objects where they are texts' parents."""
_OWN_HEADERS = frozenset(
    {"user-agent", "content-type", "x-title", "x-codex-turn-metadata", "anthropic-version", "anthropic-beta"}
)


def fill(text: str) -> str:
    """Return words of the text's length, with its line breaks and surrounding spaces."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    lines = []
    for number, line in enumerate(text.split("\n")):
        body = line.strip()
        before = line[: len(line) - len(line.lstrip())] if body else line
        after = line[len(before) + len(body) :]
        lines.append(before + _words(seed + number, len(body)) + after)
    return "\n".join(lines)


def _words(seed: int, length: int) -> str:
    words: list[str] = []
    state = seed
    while sum(map(len, words)) + len(words) < length + 1:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(_WORDS[(state >> 33) % len(_WORDS)])
    return re.sub(r"\s$", "s", " ".join(words)[:length])


class Filler:
    """Replaces the texts of one recording, but for those of the scripted model."""

    def __init__(self, own: set[str], signatures: dict[str, str]) -> None:
        self._own = own
        self._signatures = signatures

    def value(self, value: Any, name: str = "") -> Any:
        """Return a value of a body with its texts replaced."""
        if isinstance(value, dict):
            return {key: self.value(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, name) for inner in value]
        if not isinstance(value, str) or name in _NAMES or value in self._own or value in (SAME, PREVIOUS):
            return self._signatures.get(value, value) if name == "thoughtSignature" else value
        if value.startswith(BILLING):
            return BILLING + fill(value[len(BILLING) :])
        if name == "arguments" or (value.startswith(("{", "[")) and name in ("content", "output")):
            return self._json(value)
        return fill(value)

    def _json(self, text: str) -> str:
        """Replace the texts inside a text of JSON, and keep its spelling otherwise."""
        try:
            value = json.loads(text)
        except ValueError:
            return fill(text)
        if not isinstance(value, dict | list):
            return fill(text)
        spaced = ": " in text or ", " in text
        separators = None if spaced else (",", ":")
        return json.dumps(self.value(value), ensure_ascii=False, separators=separators)


def own_texts(entries: list[dict[str, Any]]) -> set[str]:
    """Return every text that the scripted model answered with, whole or inside its arguments."""
    found = {PROMPT, json.dumps(PROMPT), ""}
    for entry in entries:
        if "dialect" in entry:
            _collect(entry["answer"], found)
            _collect(entry["raw"], found)
    return found | {text.strip() for text in found}


def _collect(value: Any, found: set[str]) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _collect(inner, found)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, found)
    elif isinstance(value, str):
        found.add(value)
        try:
            inner = json.loads(value)
        except ValueError:
            return
        if isinstance(inner, dict | list):
            _collect(inner, found)


def our_signatures(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Return, for the recorder's signatures of calls, those that the gateway would have written."""
    signatures = {}
    for entry in entries:
        for candidate in (entry.get("answer") or {}).get("candidates", ()):
            for part in candidate["content"]["parts"]:
                if "functionCall" in part:
                    key, call_id = str(entry["n"]), part["functionCall"]["id"]
                    signatures[part["thoughtSignature"]] = sign(key, call_id)
    return signatures


def make(source: Path, target: Path) -> None:
    """Write the fixture of one recording."""
    entries = [json.loads(line) for line in source.read_text().splitlines()]
    filler = Filler(own_texts(entries), our_signatures(entries))
    lines, before = [], {}
    for entry in entries:
        kept = {"headers": _headers(entry["headers"]), "path": entry["path"]}
        if entry.get("dialect"):
            whole = expand(entry["body"], before)
            kept |= {"dialect": entry["dialect"], "label": entry["label"], "raw": entry["raw"]}
            kept["body"] = filler.value(_shared(entry["body"], whole, before))
            before = before | whole
            kept["answer"] = filler.value(entry["answer"])
        lines.append(json.dumps(kept, ensure_ascii=False, separators=(",", ":")))
    target.write_text("\n".join(lines) + "\n")


def _shared(body: dict[str, Any], whole: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    shorter = dict(body)
    for name in LISTS:
        if isinstance(shorter.get(name), list):
            old = before.get(name, [])
            shorter[name] = [
                SAME if index < len(old) and old[index] == item else item
                for index, item in enumerate(whole[name])
            ]
    return shorter


def _headers(headers: Any) -> Any:
    if headers == PREVIOUS:
        return headers
    return {
        name: value
        for name, value in headers.items()
        if name in _OWN_HEADERS or "session" in name or "thread" in name or "agent" in name
    }


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for recording in sorted(folder.glob("*.jsonl")):
        if not names or recording.stem in names:
            make(recording, FOLDER / recording.name)
