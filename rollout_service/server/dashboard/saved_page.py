"""The page of one rollout as a file of its own: the page's own modules, with the answers that they would ask for.

Guarantees: the file loads nothing and sends nothing, by its own policy, and runs no script but the one that the policy
names by its hash. The answers are JSON in elements that no browser executes, and nothing in them ends such an element.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape

from rollout_service.server.dashboard.bundle import check_embeddable, join_modules
from rollout_service.server.dashboard.routes import INDEX, static_files

ENTRY = "saved/main.js"
INSTEAD = {"lib/api.js": "saved/api.js"}
"""What answers from the file stands in for what asks the service."""
_STYLES = re.compile(r'<link rel="stylesheet" href="dashboard/([^"]+)">')
_NO_SCRIPT = "This page needs JavaScript. Its data is in this file, as JSON."


@dataclass(frozen=True)
class _Viewer:
    """What is the same in all files."""

    script: str
    style: str

    @property
    def policy(self) -> str:
        """The content security policy, which names the script and the style by their hashes."""
        parts = {
            "default-src": "'none'",
            "script-src": _hash(self.script),
            "style-src": _hash(self.style),
            "connect-src": "'none'",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        return "; ".join(f"{name} {value}" for name, value in parts.items())


def saved_page(title: str, answers: Mapping[str, bytes]) -> bytes:
    """Return the file with these answers: JSON by the paths that the page's modules ask for."""
    viewer = _viewer()
    head = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(viewer.policy, quote=False)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{viewer.style}</style>
</head>
<body>
<div id="app"><noscript>{_NO_SCRIPT}</noscript></div>
"""
    end = f'<script type="module">{viewer.script}</script>\n</body>\n</html>\n'
    blocks = [json_block(path, content) for path, content in answers.items()]
    return b"".join([head.encode(), *blocks, end.encode()])


def json_block(path: str, content: bytes) -> bytes:
    """Return an element that holds JSON under a name.

    In JSON `<` is in strings only, where it can be written as its code: then no text can look like markup.
    """
    start = f'<script type="application/json" data-path="{escape(path)}">'
    return start.encode() + content.replace(b"<", b"\\u003c") + b"</script>\n"


@cache
def _viewer() -> _Viewer:
    texts = {path: file.content.decode() for path, file in static_files().items()}
    styles = dict.fromkeys(_STYLES.findall(texts[INDEX]))
    return _Viewer(
        script=join_modules(texts, ENTRY, INSTEAD),
        style=check_embeddable("\n".join(texts[name] for name in styles)),
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
