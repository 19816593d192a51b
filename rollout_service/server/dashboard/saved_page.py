"""The page of one rollout as a single file: the page's modules in one script, with the answers that they ask for.

By its own policy, the file loads nothing and sends nothing, and runs no script but the one whose hash the policy names.
The answers are JSON in elements that no browser executes, and nothing in them ends such an element.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from html import escape
from posixpath import dirname, join, normpath

from rollout_service.server.dashboard.routes import INDEX, static_files

ENTRY = "saved/main.js"
INSTEAD = {"lib/api.js": "saved/api.js"}
"""Modules that ask the service, and their stand-ins, which answer from the file."""
_STYLES = re.compile(r'<link rel="stylesheet" href="dashboard/([^"]+)">')
_NO_SCRIPT = "This page needs JavaScript. Its data is in this file, as JSON."


def _policy(script: str, style: str) -> str:
    none = "; ".join(f"{name} 'none'" for name in ("default-src", "connect-src", "base-uri", "form-action"))
    return f"{none}; script-src {_hash(script)}; style-src {_hash(style)}"


def saved_page(title: str, answers: Mapping[str, bytes]) -> bytes:
    """Return the file with these answers: JSON by the paths that the page's modules ask for."""
    script, style = _viewer()
    head = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(_policy(script, style), quote=False)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<div id="app"><noscript>{_NO_SCRIPT}</noscript></div>
"""
    end = f'<script type="module">{script}</script>\n</body>\n</html>\n'
    blocks = [json_block(path, content) for path, content in answers.items()]
    return b"".join([head.encode(), *blocks, end.encode()])


def json_block(path: str, content: bytes) -> bytes:
    # In JSON `<` is in strings only, where it can be escaped: then no text can look like markup.
    start = f'<script type="application/json" data-path="{escape(path)}">'
    return start.encode() + content.replace(b"<", b"\\u003c") + b"</script>\n"


@cache
def _viewer() -> tuple[str, str]:
    """Return the page's script and its style sheet."""
    texts = {path: file.content.decode() for path, file in static_files().items()}
    styles = dict.fromkeys(_STYLES.findall(texts[INDEX]))
    style = check_embeddable("\n".join(texts[name] for name in styles))
    return join_modules(texts, ENTRY, INSTEAD), style


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


_BEGIN = r"(?:(?<=[;}\n])|\A)"
_IMPORT = re.compile(_BEGIN + r"import\s*(\w+)?\s*(?:\{([^{}]*)\})?\s*from\s*\"([^\"]+)\";?")
_EXPORT_LIST = re.compile(_BEGIN + r"export\s*\{(?P<names>[^{}]*)\};?")
_EXPORT_PARTS = re.compile(_BEGIN + r"export const \{(?P<names>[\w\s,$]+)\}")
_EXPORT_ONE = re.compile(_BEGIN + r"export (?:async )?(?:const|class|function\*?) (?P<names>[\w$]+)")
_EXPORT_DEFAULT = re.compile(_BEGIN + r"export default ")
_LEFT = re.compile(_BEGIN + r"(?:import|export)(?=[\s{*\"'])[^\n]{0,80}")
_DEFAULT = "default_export"
_ENDS_ELEMENT = re.compile(r"</(?=script|style)|<!--|<script", re.IGNORECASE)


def join_modules(files: Mapping[str, str], entry: str, instead: Mapping[str, str]) -> str:
    """Join ES modules into one script that runs the module `entry`.

    Each module is in the script once, after all that it imports, and sees only the names that it imports.

    Args:
        files: The texts of modules by their paths.
        entry: The path of the module that is run.
        instead: The modules that stand in for others, by the paths of these.

    Raises:
        ValueError: The modules cannot be joined: a module or a name is missing, imports are circular, or the form of an
            `import` or `export` is unknown.
    """
    bundle = _Bundle(files, instead)
    bundle.add(entry, ())
    return check_embeddable("\n".join(module.text for module in bundle.modules.values()))


def check_embeddable(text: str) -> str:
    """Return a script or style sheet unchanged if it can be the text of its element.

    Raises:
        ValueError: Something in it would end the element, or be read as a comment.
    """
    if found := _ENDS_ELEMENT.search(text):
        raise ValueError(f"{text[max(0, found.start() - 40) : found.end() + 20]!r} cannot be in an element")
    return text


class _Bundle:
    def __init__(self, files: Mapping[str, str], instead: Mapping[str, str]) -> None:
        self._files = files
        self._instead = instead
        self.modules: dict[str, _Module] = {}

    def add(self, path: str, importers: tuple[str, ...]) -> _Module:
        if path in importers:
            raise ValueError(f"modules import each other: {' -> '.join((*importers, path))}")
        if path not in self.modules:
            if path not in self._files:
                raise ValueError(f"there is no module {path} for {importers[-1:]}")
            source = self._files[path]
            specifiers = [found[3] for found in _IMPORT.finditer(source)]
            others = {name: self.add(self._resolve(path, name), (*importers, path)) for name in specifiers}
            self.modules[path] = _Module(path, source, others)
        return self.modules[path]

    def _resolve(self, importer: str, specifier: str) -> str:
        if not specifier.startswith("."):
            raise ValueError(f"{importer}: {specifier!r} is not a relative path")
        path = normpath(join(dirname(importer), specifier))
        return self._instead.get(path, path)


class _Module:
    """A module as a constant of the script: an object with its exports."""

    def __init__(self, path: str, source: str, others: Mapping[str, _Module]) -> None:
        self._path = path
        self._others = others
        self.name = re.sub(r"\W", "_", path)
        self.exports: dict[str, str] = {}
        """Names inside the module by the names under which they are exported."""
        text = _IMPORT.sub(self._take, source)
        for form in (_EXPORT_LIST, _EXPORT_PARTS, _EXPORT_ONE, _EXPORT_DEFAULT):
            text = form.sub(self._give, text)
        if left := _LEFT.search(text):
            raise ValueError(f"{path}: {left[0]!r} is a form that is not known")
        names = ", ".join(f"{outside}: {inside}" for outside, inside in self.exports.items())
        self.text = f"const {self.name} = (() => {{\n{text}\nreturn {{{names}}};\n}})();"

    def _take(self, found: re.Match[str]) -> str:
        other = self._others[found[3]]
        pairs = _pairs(found[2] or "") + ([("default", found[1])] if found[1] else [])
        for outside, _ in pairs:
            if outside not in other.exports:
                raise ValueError(f"{self._path}: {found[3]!r} does not export {outside!r}")
        return f"const {{{', '.join(f'{outside}: {inside}' for outside, inside in pairs)}}} = {other.name};"

    def _give(self, found: re.Match[str]) -> str:
        if found.re is _EXPORT_DEFAULT:
            self.exports["default"] = _DEFAULT
            return f"const {_DEFAULT} = "
        self.exports |= {outside: inside for inside, outside in _pairs(found["names"])}
        return "" if found.re is _EXPORT_LIST else found[0].removeprefix("export ")


def _pairs(names: str) -> list[tuple[str, str]]:
    parts = [part.split(" as ") for part in names.split(",") if part.strip()]
    return [(part[0].strip(), part[-1].strip()) for part in parts]
