"""Documentation stays usable: links and anchors exist, code names pages that exist, and pages stay short.

The pages that list error codes, routes and metrics are complete.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rollout_service.server.api.app import create_app
from rollout_service.settings import Settings
from tests.support.sources import parse

ROOT = Path(__file__).parents[3]
GENERATED = {"docs/settings.md"}
LONG = {"CHANGELOG.md"}
MAX_LINES, MAX_CELL = 250, 300
LINK = re.compile(
    r"(?<!!)\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|(?:href|src(?:set)?)=\"([^\"]+)\""
)
PAGE = re.compile(r"(?<![\w./-])docs/[\w./-]+\.(?:md|svg)(?:#[\w-]+)?")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def tracked(*patterns: str) -> list[str]:
    """Return the paths of tracked files, and of new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted({name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()})


PAGES = tracked("*.md")


def prose(page: str) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", (ROOT / page).read_text())


@cache
def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        base = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        name, number = base, 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def links(page: str) -> Iterator[str]:
    for match in LINK.finditer(prose(page)):
        target = next(group for group in match.groups() if group)
        if not re.match(r"[a-z]+:", target):
            yield target


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_and_its_anchor_exist(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}, which does not exist"
        if anchor:
            name = str(file.resolve().relative_to(ROOT))
            assert anchor in anchors(name), f"{page} links to {target}; {name} has no such heading"


@pytest.mark.slow
def test_every_page_named_outside_of_links_exists():
    missing = []
    for name in tracked(
        "*.py", "*.md", "*.sh", "*.toml", "*.def", "*.service", "*.yaml", "scripts/*", "deploy/*"
    ):
        for named in PAGE.findall((ROOT / name).read_text(errors="replace")):
            path, _, anchor = named.partition("#")
            if not (ROOT / path).is_file() or (anchor and anchor not in anchors(path)):
                missing.append(f"{name}: {named}")
    assert not missing


@pytest.mark.parametrize("page", sorted(set(PAGES) - GENERATED - LONG))
def test_pages_are_short_and_tables_readable(page):
    lines = (ROOT / page).read_text().splitlines()
    assert len(lines) <= MAX_LINES, f"{page} has {len(lines)} lines: divide it"
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in re.split(r"(?<!\\)\|", line)]
    assert not [cell for cell in cells if len(cell) > MAX_CELL], page


def test_the_page_of_figures_is_that_of_the_last_run():
    command = [sys.executable, str(ROOT / "scripts/figures"), "--page"]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs/explanation/figures.md").read_text() == page


def test_the_table_of_contents_names_every_page():
    named = {
        str(((ROOT / "docs" / target.partition("#")[0]).resolve()).relative_to(ROOT))
        for target in links("docs/README.md")
    }
    assert not {page for page in PAGES if page.startswith("docs/")} - named - {"docs/README.md"}


@pytest.mark.slow
@pytest.mark.xdist_group("sources")
def test_the_page_on_errors_lists_every_code():
    page = (ROOT / "docs/reference/errors.md").read_text()
    codes = set()
    for name in tracked(
        "rollout_service/**/*.py", "rollout_service/*.py", "sandboxes/**/*.py", "sandboxes/*.py"
    ):
        for node in ast.walk(parse(ROOT / name)):
            if isinstance(node, ast.ClassDef) and "testing" not in name:
                codes |= set(_class_codes(node))
    assert len(codes) > 50
    assert not {code for code in codes if f"`{code}`" not in page}


def _class_codes(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        targets = (
            line.targets
            if isinstance(line, ast.Assign)
            else [line.target]
            if isinstance(line, ast.AnnAssign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == "code" for target in targets):
            value = line.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


@pytest.mark.slow
def test_the_page_on_the_api_lists_every_route():
    page = (ROOT / "docs/reference/http-api.md").read_text()
    listed = set(re.findall(r"`([A-Z]+) (/[^?`]*)", page))
    paths = create_app(Settings()).openapi()["paths"]
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert listed == routes


def test_the_page_on_metrics_lists_every_metric_and_only_log_lines_that_exist():
    page = (ROOT / "docs/reference/metrics-and-log.md").read_text()
    code = "".join(
        (ROOT / name).read_text() for name in tracked("rollout_service/**/*.py", "sandboxes/**/*.py")
    )
    telemetry = "".join(
        (ROOT / name).read_text() for name in tracked("rollout_service/observability/telemetry/*.py")
    )
    metrics = set(re.findall(r'"(rollout_\w+)"', telemetry)) - {"rollout_id", "rollout_ids"}
    assert len(metrics) > 30
    assert not {name for name in metrics if not re.search(rf"`{name}(_total)?\b", page)}
    lines = re.findall(r"^\| (`[^|]+) \|", page.partition("## Log")[2], re.MULTILINE)
    written = {line for cell in lines for line in re.findall(r"`([^`]+)`", cell)}
    assert len(written) > 15
    assert not {line for line in written if f'"{line}"' not in code}


FILE = re.compile(
    r"`((?:tests|benchmarks|scripts|examples|rollout_service|rollout_client|sandboxes|api_schemas|deploy)/[\w./*-]+)`"
)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LONG])
def test_every_file_that_a_page_names_exists(page):
    named = set(FILE.findall(prose(page)))
    assert not {path for path in named if not any(ROOT.glob(path.rstrip("/.")))}, page


TEST = re.compile(r"`(tests/[\w/.]+\.py)::(test_\w+)`")


def test_every_test_that_a_page_names_exists():
    named = [(page, *found) for page in PAGES for found in TEST.findall(prose(page))]
    assert named
    assert not [
        (page, path, name)
        for page, path, name in named
        if not (ROOT / path).is_file() or f"def {name}(" not in (ROOT / path).read_text()
    ]


def test_the_page_on_architecture_has_the_layers_of_the_script():
    script = ast.parse((ROOT / "scripts" / "architecture").read_text())
    [layers] = [
        ast.literal_eval(node.value)
        for node in script.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    ]
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## The layers")[2]
    rows = re.findall(r"^\| (`[^|]+) \|", page.partition("## The folder tree")[0], re.MULTILINE)
    assert [tuple(re.findall(r"`([\w.]+)`", row)) for row in rows] == list(layers)
