"""Completes ids in a shell, within half a second and without errors; only plain ids, so nothing is interpreted."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from rollout_service.cli.common import DEFAULT_URL

SECONDS = 0.5
MOST = 200
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]*")
_MAX_BYTES = 4 << 20


def _known(path: str, under: str | None, name: str) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion of the ids at a path of the server: fields `name` of a list, which may be below a key."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return _matching(_values(_ask(ctx, path), under, name), incomplete)

    return complete


def images(incomplete: str) -> list[str]:
    try:
        from sandboxes.images.store import SUFFIX, default_root

        names = (path.name.removesuffix(SUFFIX) for path in default_root().glob(f"*{SUFFIX}"))
        return _matching(names, incomplete)
    except Exception:  # noqa: BLE001 - a shell that waits for a completion wants no error
        return []


def _matching(values: Iterable[str], incomplete: str) -> list[str]:
    found = (value for value in values if value.startswith(incomplete) and _ID.fullmatch(value))
    return list(dict.fromkeys(found))[:MOST]


def _values(answer: Any, under: str | None, name: str) -> Iterator[str]:
    """Yield the texts in the field `name` of a list of objects; nothing if the answer has another form."""
    if under is not None:
        answer = answer.get(under) if isinstance(answer, dict) else None
    for one in answer if isinstance(answer, list) else ():
        value = one.get(name) if isinstance(one, dict) else None
        if isinstance(value, str):
            yield value


def _ask(ctx: typer.Context, path: str) -> Any:
    """Return the answer of the server that the command line names; None if it does not answer in time."""
    import json
    from urllib.request import ProxyHandler, Request, build_opener

    try:
        url = str(ctx.params.get("url") or os.environ.get("ROLLOUT_URL") or DEFAULT_URL).rstrip("/")
        key = ctx.params.get("key") or os.environ.get("ROLLOUT_KEY")
        if not url.startswith(("http://", "https://")):
            return None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        opener = build_opener(ProxyHandler({}), *_tls())
        request = Request(url + path, headers=headers)  # noqa: S310 - it begins with http
        with _deadline(), opener.open(request, timeout=SECONDS) as answer:
            return json.loads(answer.read(_MAX_BYTES))
    except Exception:  # noqa: BLE001 - a shell that waits for a completion wants no error
        return None


@contextmanager
def _deadline() -> Iterator[None]:
    """End the block after `SECONDS`, whether it looks up a name or reads an answer that comes byte by byte."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _tls() -> list[Any]:
    """Return the handlers that make TLS trust the authority of `ROLLOUT_CA_FILE`, if set."""
    file = os.environ.get("ROLLOUT_CA_FILE")
    if not file:
        return []
    import ssl
    from urllib.request import HTTPSHandler

    context = ssl.create_default_context()
    context.load_verify_locations(file)
    return [HTTPSHandler(context=context)]


runs = _known("/v1/runs", "runs", "run_id")
rollouts = _known(f"/v1/summaries?limit={MOST}", "rows", "rollout_id")
backends = _known("/v1/backends", None, "backend_id")
nodes = _known("/v1/nodes", None, "node")
sessions = _known(f"/v1/sessions?limit={MOST}", "sessions", "session_id")
environments = _known("/v1/environments", None, "name")
