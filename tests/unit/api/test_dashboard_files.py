"""The page's files come with strict headers, nothing else can be read, and none of them makes markup of text."""

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from rollout_service.server.api.app import create_app
from rollout_service.server.dashboard import routes
from rollout_service.settings import load_settings

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "rollout_service" / "server" / "dashboard" / "static"
KEY = "a-key-of-enough-characters-for-anyone"
IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*\(?\s*["']([\w@./-]+)["']""")
SOURCES = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".html", ".css")]
OURS = [path for path in SOURCES if path.parent.name != "vendor"]
INJECTS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setHTML|srcdoc"
    r"|\beval\(|new Function|javascript:|\.html\s*="
)


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(load_settings(keys=[KEY]))


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html"),
        ("/dashboard/app.js", "text/javascript"),
        ("/dashboard/vendor/preact.js", "text/javascript"),
        ("/dashboard/style.css", "text/css"),
        ("/dashboard/icon.svg", "image/svg+xml"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_file_needs_no_key_and_has_strict_headers(http, path, media_type, method):
    answer = await http.request(method, path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == media_type
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    assert bool(answer.content) is (method == "GET")


async def test_the_data_behind_the_page_needs_a_key(http):
    for path in ("/v1/rollouts", "/v1/nodes", "/dashboardx", "/index.html"):
        assert (await http.get(path)).status_code == 401, path


async def test_a_file_is_sent_again_only_if_it_changed(http):
    tag = (await http.get("/dashboard/app.js")).headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = await http.get("/dashboard/app.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert "content-security-policy" in again.headers
    assert (await http.get("/dashboard/app.js", headers={"If-None-Match": '"other"'})).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/",
        "/dashboard/nothing.js",
        "/dashboard/%2e%2e/routes.py",
        "/dashboard/..%2froutes.py",
        "/dashboard/lib/..%2f..%2froutes.py",
        "/dashboard//etc/passwd",
        "/dashboard/%2fetc%2fpasswd",
        "/dashboard/app.js%00.html",
        "/dashboard/lib",
        "/dashboard/vendor/README.md",
        "/dashboard/routes.py",
    ],
)
async def test_nothing_but_the_files_of_the_page_is_served(http, path):
    answer = await http.get(path)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_nothing_can_be_written(http):
    for method in ("POST", "PUT", "DELETE"):
        assert (await http.request(method, "/dashboard/app.js")).status_code == 405


async def test_the_folder_leads_to_the_page_by_a_relative_address(http):
    answer = await http.get("/dashboard")
    assert (answer.status_code, answer.headers["location"]) == (307, "./")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(STATIC)))
def test_what_a_file_imports_is_served(path):
    served = routes.static_files()
    assert str(path.relative_to(STATIC)) in served
    if path.suffix == ".js":
        for name in IMPORT.findall(path.read_text()):
            assert name.startswith("."), f"the browser cannot resolve {name!r}"
            assert str((path.parent / name).resolve().relative_to(STATIC)) in served, name


def test_the_page_names_files_that_are_served():
    named = re.findall(r'(?:href|src)="([^"]+)"', (STATIC / "index.html").read_text())
    assert named
    assert {name.removeprefix("dashboard/") for name in named} <= set(routes.static_files())
    assert all(name.startswith("dashboard/") for name in named), "addresses are relative, for any prefix"


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(STATIC)))
def test_no_source_makes_markup_of_text(path):
    assert not INJECTS.findall(path.read_text())


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(STATIC)))
def test_no_source_has_an_address_of_its_own(path):
    """Addresses of the API are relative, and nothing is loaded from elsewhere."""
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"""["'`(]/(?:v1|dashboard)\b""", text), "an absolute path breaks below a prefix"
    if path.suffix != ".js":
        assert not re.findall(r"https?://", text)


def test_no_two_style_sheets_style_the_same_class():
    """All of them are loaded on every page, so one would change the looks of the other's page."""
    found: dict[str, set[str]] = {}
    for path in (STATIC / "styles").glob("*.css"):
        rules = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for selectors in re.findall(r"([^{}]+)\{", rules):
            for selector in selectors.split(","):
                if first := re.match(r"\s*[a-z]*\.([\w-]+)", selector):
                    found.setdefault(first[1], set()).add(path.name)
    base = set(re.findall(r"\.([a-z][\w-]+)", (STATIC / "style.css").read_text()))
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in base} == {}


def test_the_vendored_libraries_are_those_that_the_readme_describes():
    command = [sys.executable, ROOT / "scripts" / "vendor", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_a_changed_library_is_noticed(tmp_path):
    script = tmp_path / "scripts" / "vendor"
    script.parent.mkdir()
    script.write_text((ROOT / "scripts" / "vendor").read_text())
    vendor = tmp_path / "rollout_service" / "server" / "dashboard" / "static" / "vendor"
    vendor.mkdir(parents=True)
    for path in (STATIC / "vendor").iterdir():
        (vendor / path.name).write_bytes(path.read_bytes())
    (vendor / "preact.js").write_text("changed")
    (vendor / "more.js").write_text("new")
    checked = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert re.findall(r"vendor: (\S+)", checked.stderr) == ["preact.js", "more.js"]


def test_no_file_is_left_out_of_a_distribution():
    """The build leaves out what git ignores."""
    paths = "\n".join(str(path) for path in STATIC.rglob("*"))
    ignored = subprocess.run(
        ["git", "check-ignore", "--stdin"], cwd=ROOT, input=paths, capture_output=True, text=True, check=False
    )
    assert (ignored.returncode, ignored.stdout) == (1, "")
