"""Chooses the tests of a tier, and orders the second tier for a run whose time is limited.

The first tier is what a change has to pass. Its part 0 is the unit tests that are quick and need no real program. The
second tier has the tests of programs that take long to install or to run (`parts.py`), and those marked `extended`.
With `--begin-until`, they begin until that time: first those of parts that the last commits touched, then the others in
an order that turns with each commit, so that all have their turn. A test that was not begun counts as neither passed
nor failed; the summary and a file name it.
"""

import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.plugins.parts import PARTS, Part
from tests.support.plugins.workers import keep_together, longest_first

NOT_RUN = Path(".cache") / "tests-not-run.txt"
"""Lists the tests of the last run for which there was no time, one in a line."""
RECENT_COMMITS = 30

_ROOT = Path(__file__).parents[3]
_UNIT_TESTS = _ROOT / "tests" / "unit"
_NOT_QUICK = frozenset({"slow", "torch", "extended", *(part.name for part in PARTS)})
_MODULE_MARKS = re.compile(r"^pytestmark = (?:\[[^]]*]|.*)", re.MULTILINE)
_SUPPORT_IMPORT = re.compile(r"^ *from (tests\.support\.[\w.]+) import ", re.MULTILINE)
_SECOND = {part.name: part for part in PARTS if part.tier == 2}
_NOT_RUN = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", type=int, choices=(0, 1, 2), help="only this tier; 0 is the quick unit tests")
    parser.addoption(
        "--begin-until",
        type=float,
        metavar="TIME",
        help="begin no test of the second tier after this time, in seconds since the epoch",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NOT_RUN] = []
    for part in PARTS:
        config.addinivalue_line("markers", f"{part.name}: {part.purpose}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of modules whose marks say that they have no test of the tier: torch alone takes seconds."""
    path, wanted = collection_path, config.getoption("--tier")
    if not path.name.startswith("test_") or wanted not in (0, 2):
        return None
    if wanted == 0:
        of_module = _MODULE_MARKS.search(path.read_text())
        return bool(of_module and _NOT_QUICK & _named(of_module[0])) or None
    marked = _marks_in(path) | _marks_in(path.with_name("conftest.py"))
    return not marked & {"extended", *_SECOND} or None


def _marks_in(path: Path) -> set[str]:
    """Return the marks that a module names, or a support module that it imports, such as those of parameters."""
    if not path.exists():
        return set()
    text = path.read_text()
    imported = (_ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in _SUPPORT_IMPORT.findall(text))
    return _named(text).union(*(_named(module.read_text()) for module in imported if module.exists()))


def _named(text: str) -> set[str]:
    return set(re.findall(r"mark\.(\w+)", text))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    keep_together(items)
    yield
    if (wanted := config.getoption("--tier")) is not None:
        chosen = {item for item in items if (_is_quick(item) if wanted == 0 else tier(item) == wanted)}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if hasattr(config, "workerinput"):  # only in workers of xdist
        longest_first(items)
        in_turn(items)


def tier(item: pytest.Item) -> int:
    return 2 if parts(item) or item.get_closest_marker("extended") else 1


def _is_quick(item: pytest.Item) -> bool:
    return _UNIT_TESTS in item.path.parents and not _NOT_QUICK & {mark.name for mark in item.iter_markers()}


def parts(item: pytest.Item) -> list[Part]:
    """Return the parts of the second tier that a test needs."""
    return [_SECOND[mark.name] for mark in item.iter_markers() if mark.name in _SECOND]


# -- the order of the second tier ----------------------------------------------


def in_turn(items: list[pytest.Item]) -> None:
    """Sort tests in place: the first tier, what was touched, and the others from another place at each commit."""
    changed, turn = _changed_files(), _commits()
    names = sorted({_turn_name(item) for item in items if tier(item) == 2})
    places = {name: (place - turn) % len(names) for place, name in enumerate(names)}

    def rank(item: pytest.Item) -> tuple[int, bool, int]:
        if tier(item) == 1:
            return 1, False, 0
        return 2, not _is_touched(item, changed), places[_turn_name(item)]

    items.sort(key=rank)


def _turn_name(item: pytest.Item) -> str:
    needed = parts(item)
    return needed[0].name if needed else item.path.stem


def _is_touched(item: pytest.Item, changed: Iterable[str]) -> bool:
    module = item.nodeid.partition("::")[0]
    own = [path for mark in item.iter_markers("extended") for path in mark.args]
    beginnings = (module, *own, *(path for part in parts(item) for path in part.paths))
    return any(name.startswith(beginnings) for name in changed)


def _changed_files() -> set[str]:
    return {line for line in _git("log", f"-{RECENT_COMMITS}", "--format=", "--name-only") if line}


def _commits() -> int:
    return int(next(iter(_git("rev-list", "--count", "HEAD")), "0"))


def _git(*arguments: str) -> list[str]:
    """Return the lines that git prints, or none where the sources are not in a repository."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


# -- the end of the time -------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass over a test for which there is no time: without a report, it has no outcome."""
    until = item.config.getoption("--begin-until")
    if until is None or time.time() < until or tier(item) == 1:
        return None
    item.config.stash[_NOT_RUN].append(item.nodeid)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # in workers of xdist
        session.config.workeroutput["not_run"] = session.config.stash[_NOT_RUN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    node.config.stash[_NOT_RUN].extend(getattr(node, "workeroutput", {}).get("not_run", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--begin-until") is None:
        return
    names = sorted(config.stash[_NOT_RUN])
    NOT_RUN.parent.mkdir(exist_ok=True)
    NOT_RUN.write_text("".join(f"{name}\n" for name in names))
    if names:
        terminalreporter.section("not run, since the time was up")
        terminalreporter.write_line("\n".join(names))
        terminalreporter.write_line(f"{len(names)} tests were not run; {NOT_RUN} lists them")
