"""The reference page of the client has every public call of it, with its signature, and no other."""

import inspect
import re
from pathlib import Path

import pytest

from rollout_client import errors
from rollout_client.client import ClientRun, LeasedBatch, RolloutClient

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "python-client.md").read_text()
TABLE = re.compile(r"^\| (call[^|]*|error) \|.*\n\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE)


def listed(head: str) -> list[str]:
    """Return the first cells of the rows of all tables with this head."""
    rows = [row for title, rows in TABLE.findall(PAGE) if title in head.split("/") for row in rows.splitlines()]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row.split("|")[1])]


def signature(name: str, function: object, hidden: str = "self") -> str:
    """Return a call as it is written, without its types."""
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    shown = [one.replace(annotation=inspect.Parameter.empty) for key, one in parameters.items() if key != hidden]
    return f"{name}{inspect.Signature(shown)}"


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (RolloutClient, "call/call of the client"),
        (ClientRun, "call of a `ClientRun`"),
        (LeasedBatch, "call of a `LeasedBatch`"),
    ],
)
def test_the_page_lists_the_calls_with_their_signatures(kind: type, head: str) -> None:
    public = inspect.getmembers(kind, lambda value: inspect.isfunction(value))
    calls = [signature(name, value) for name, value in public if not name.startswith("_")]
    if kind is RolloutClient:
        calls.append(signature("RolloutClient", kind.__init__))
    assert sorted(listed(head)) == sorted(calls)


def test_the_page_lists_the_errors() -> None:
    made = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert set(listed("error")) == made - {"ClientError", "ProblemError"}
