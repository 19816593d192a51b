"""The pages of the site, staged from `docs/`.

Guarantee: a link that leaves `docs/` leads to a copy of that file within the site: a page as it is, and source as a
listing. A link to nothing is an error.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path, PurePosixPath

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".sh": "bash",
    ".yml": "yaml",
    ".json": "json",
    ".def": "singularity",
}
OUTSIDE = "repository"
"""The folder of the site that holds what pages link to outside of `docs/`."""


def stage_pages(root: Path, target: Path) -> None:
    """Copy `docs/` of a checkout to `target`, with everything that its pages link to.

    Raises:
        SystemExit: A page links to something that does not exist.
    """
    shutil.copytree(root / "docs", target)
    (target / "README.md").rename(target / "index.md")
    waiting = [(page, root / "docs" / _source(page, target)) for page in sorted(target.rglob("*.md"))]
    while waiting:
        page, source = waiting.pop()
        text, found = _redirect(page.read_text(), page, source, root, target)
        page.write_text(text)
        waiting += found


def _source(page: Path, target: Path) -> Path:
    path = page.relative_to(target)
    return Path("README.md") if path == Path("index.md") else path


def _redirect(text: str, page: Path, source: Path, root: Path, target: Path) -> tuple[str, list[tuple[Path, Path]]]:
    """Return a page's text with its links redirected, and the pages that were added for them."""
    added: list[tuple[Path, Path]] = []

    def redirect(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        if ":" in link:
            return match[0]
        file = (source.parent / link).resolve()
        if not file.exists():
            raise SystemExit(f"{source.relative_to(root)} links to {link}, which does not exist")
        place, is_new = _place(file, root, target)
        if is_new and place.suffix == ".md" and file.suffix == ".md":
            added.append((place, file))
        return f"{before}{_relative(place, page)}{after}"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(redirect, text[end : fence.start()]), _plain(fence[0])]
        end = fence.end()
    return "".join([*parts, LINK.sub(redirect, text[end:])]), added


def _plain(fence: str) -> str:
    """Return a diagram as a listing, since what would draw it comes from another host."""
    return fence.replace("```mermaid", "```text", 1)


def _place(file: Path, root: Path, target: Path) -> tuple[Path, bool]:
    """Return where a file is in the site, and whether it was put there just now."""
    if file.is_dir():
        file = next((one for one in (file / "README.md", file / "__init__.py") if one.exists()), file)
    path = file.relative_to(root)
    if path.parts[0] == "docs":
        inside = PurePosixPath(*path.parts[1:])
        return target / ("index.md" if str(inside) == "README.md" else inside), False
    place = target / OUTSIDE / path
    if file.is_dir():
        place, text = place / "index.md", _listing(file, path)
    elif file.suffix in (".md", ".svg", ".png"):
        text = None
    else:
        place, text = place.with_name(f"{path.name}.md"), _quoted(file, path)
    if place.exists():
        return place, False
    place.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        shutil.copyfile(file, place)
    else:
        place.write_text(text)
    return place, True


def _listing(folder: Path, path: Path) -> str:
    names = sorted(f"{one.name}/" if one.is_dir() else one.name for one in folder.iterdir())
    return f"# {path}\n\nThe folder `{path}` of the repository holds:\n\n" + "".join(
        f"- `{name}`\n" for name in names if not name.startswith((".", "__"))
    )


def _quoted(file: Path, path: Path) -> str:
    language = LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n~~~~~{language}\n{file.read_text()}\n~~~~~\n"


def _relative(place: Path, page: Path) -> str:
    up = 0
    parent = page.parent
    while not place.is_relative_to(parent):
        parent, up = parent.parent, up + 1
    return "../" * up + place.relative_to(parent).as_posix()
