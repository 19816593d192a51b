"""The navigation of the site, made from the tables of the index page, so that there is one list of pages."""

from __future__ import annotations

import re
from pathlib import Path

HEADING = re.compile(r"^## ([^:\n]+)(?::.*)?$", re.MULTILINE)
ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\) \|", re.MULTILINE)
GENERATED = {
    "Reference": [
        {"Commands": "reference/commands.md"},
        {"HTTP routes": "reference/openapi.md"},
        {"Python": "reference/python/index.md"},
    ]
}
"""The pages that are generated, by the section that they belong to."""


def make_navigation(docs: Path) -> list[dict[str, object]]:
    """Return the navigation for the index page of a folder of pages.

    Raises:
        SystemExit: A page of the folder is in no table, and no page of the repository.
    """
    index = (docs / "index.md").read_text()
    sections = HEADING.split(index)
    navigation: list[dict[str, object]] = [{"Home": "index.md"}]
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        entries = [{name.replace("`", ""): path} for name, path in ROW.findall(text)]
        entries += GENERATED.get(title, [])
        if entries:
            navigation.append({title: entries})
    named = {path for section in navigation[1:] for entry in _entries(section) for path in entry.values()}
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    missing = [page for page in sorted(pages - named - {"index.md", "glossary.md", "style.md"}) if _belongs(page)]
    if missing:
        raise SystemExit(f"docs/README.md lists no {', '.join(missing)}")
    return [*navigation, {"About": [{"Glossary": "glossary.md"}, {"Style": "style.md"}]}]


def _entries(section: dict[str, object]) -> list[dict[str, str]]:
    (entries,) = section.values()
    return entries if isinstance(entries, list) else []


def _belongs(page: str) -> bool:
    return not page.startswith(("repository/", "reference/python/"))
