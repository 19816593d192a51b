"""The pages, their site and the examples in them agree with the code."""

import ast
import errno
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from docs_site.__main__ import build, put_in_place
from docs_site.navigation import make_navigation
from docs_site.pages import stage_pages

from rollout_service.environments.declarative.declaration import Declaration
from rollout_service.pipeline.trial import play
from rollout_service.server.api.app import create_app
from rollout_service.settings import Settings
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
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
    for name in tracked("*.py", "*.md", "*.sh", "*.toml", "*.def", "*.service", "*.yaml", "scripts/*", "deploy/*"):
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
    for name in tracked("rollout_service/**/*.py", "rollout_service/*.py", "sandboxes/**/*.py", "sandboxes/*.py"):
        for node in ast.walk(parse(ROOT / name)):
            if isinstance(node, ast.ClassDef) and "testing" not in name:
                codes |= set(_class_codes(node))
    assert len(codes) > 50
    assert not {code for code in codes if f"`{code}`" not in page}


def _class_codes(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
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
    code = "".join((ROOT / name).read_text() for name in tracked("rollout_service/**/*.py", "sandboxes/**/*.py"))
    telemetry = "".join((ROOT / name).read_text() for name in tracked("rollout_service/observability/telemetry/*.py"))
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "docs" / "how-to").mkdir(parents=True)
    (root / "code").mkdir()
    (root / "docs" / "README.md").write_text("# Docs\n\n## How-to: do\n| [Work](how-to/work.md) | |\n")
    return root


def test_a_link_out_of_the_folder_leads_to_a_copy_in_the_site(checkout, tmp_path):
    (checkout / "code" / "part.py").write_text("print(1)\n")
    (checkout / "code" / "README.md").write_text("See [the part](part.py).\n")
    (checkout / "docs" / "how-to" / "work.md").write_text("[code](../../code/README.md#top) [x](https://a.b/c)\n")
    stage_pages(checkout, tmp_path / "site")
    page = (tmp_path / "site" / "how-to" / "work.md").read_text()
    assert page == "[code](../repository/code/README.md#top) [x](https://a.b/c)\n"
    assert "(part.py.md)" in (tmp_path / "site" / "repository" / "code" / "README.md").read_text()
    assert "print(1)" in (tmp_path / "site" / "repository" / "code" / "part.py.md").read_text()


def test_a_link_to_nothing_fails_the_build(checkout, tmp_path):
    (checkout / "docs" / "how-to" / "work.md").write_text("[gone](../gone.md)\n")
    with pytest.raises(SystemExit, match=r"docs/how-to/work\.md links to \.\./gone\.md"):
        stage_pages(checkout, tmp_path / "site")


def test_links_and_diagrams_in_code_blocks_stay_text(checkout, tmp_path):
    text = "```text\n[gone](../gone.md)\n```\n\n```mermaid\ngraph\n```\n"
    (checkout / "docs" / "how-to" / "work.md").write_text(text)
    stage_pages(checkout, tmp_path / "site")
    assert (tmp_path / "site" / "how-to" / "work.md").read_text() == text.replace("mermaid", "text")


def test_the_index_page_decides_the_navigation(checkout, tmp_path):
    (checkout / "docs" / "how-to" / "work.md").write_text("# Work\n")
    stage_pages(checkout, tmp_path / "site")
    assert make_navigation(tmp_path / "site")[1] == {"How-to": [{"Work": "how-to/work.md"}]}


def test_a_page_that_the_index_does_not_list_fails_the_build(checkout, tmp_path):
    (checkout / "docs" / "how-to" / "work.md").write_text("# Work\n")
    (checkout / "docs" / "how-to" / "rest.md").write_text("# Rest\n")
    stage_pages(checkout, tmp_path / "site")
    with pytest.raises(SystemExit, match=r"how-to/rest\.md"):
        make_navigation(tmp_path / "site")


def test_a_folder_of_other_files_is_not_replaced_by_the_site(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SystemExit, match="holds other files"):
        build(tmp_path, tmp_path / "work")
    assert (tmp_path / "thesis.txt").exists()


def test_the_pages_of_this_checkout_can_be_staged(tmp_path):
    stage_pages(ROOT, tmp_path / "site")
    sections = [title for section in make_navigation(tmp_path / "site") for title in section]
    assert sections == ["Home", "Tutorials", "How-to guides", "Reference", "Explanation", "About"]


DOCS = ROOT / "docs"
REFERENCE = (DOCS / "reference" / "environment-toml.md").read_text()


def blocks(page: str) -> list[str]:
    """Return the contents of a page's code blocks."""
    return re.findall(r"^```\w*\n(.*?)^```$", (DOCS / "how-to" / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["environment.toml", "init", "evaluate", "tasks.jsonl"])
def test_the_declarative_example_is_the_shipped_one(name):
    shipped = (ROOT / "examples" / "environments" / "wordcount" / name).read_text()
    assert shipped in blocks("write-an-environment.md")


async def test_the_python_example_runs(sandboxes):
    page = "write-an-environment-in-python.md"
    [source] = [block for block in blocks(page) if "class Definitions" in block]
    names = {}
    exec(compile(source, "example.py", "exec"), names)
    environment = names["environment"]
    policy = ScriptedPolicy([turn("", call("lookup", word="sea")), "It is water."])
    trial = await play(environment, environment.dataset()[0], policy, sandboxes)
    assert trial.score.reward == 1.0
    assert policy.messages[2].content == "a large body of salt water"


@pytest.mark.slow
def test_the_environment_and_the_test_of_the_page_on_tests_run(tmp_path):
    environment, test = blocks("test-an-environment.md")
    (tmp_path / "stock.py").write_text(environment)
    (tmp_path / "test_stock.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout


def test_every_key_is_in_the_table():
    for name in Declaration.model_fields:
        assert any(f"`{form}`" in REFERENCE for form in (name, f"[{name}]", f"[[{name}]]")), name
    for field in ("limits", "sandbox"):
        for key in Declaration.model_fields[field].annotation.model_fields:
            assert key in REFERENCE, key


def test_a_site_whose_build_is_cut_off_does_not_stand_in_the_way_of_the_next(tmp_path, monkeypatch):
    made, output, copy = tmp_path / "made", tmp_path / "site", shutil.copytree
    (made / "objects.inv").parent.mkdir()
    (made / "objects.inv").touch()
    put_in_place(made, output)

    def cut_off(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "404.html").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", cut_off)
    with pytest.raises(OSError, match="No space"):
        put_in_place(made, output)
    assert [path.name for path in output.iterdir()] == ["objects.inv"]
    monkeypatch.setattr(shutil, "copytree", copy)
    put_in_place(made, output)
    assert sorted(tmp_path.iterdir()) == [made, output]
