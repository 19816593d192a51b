"""`rollout-service submit`: requests from a file, results into a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import DEFAULT_URL, Key, Url

if TYPE_CHECKING:
    from api_schemas.rollouts import RolloutRequest
    from rollout_service.cli.jsonl import RequestFile, ResultFile
    from rollout_service.cli.progress import Tally
    from rollout_service.client import ProblemError, RolloutClient

EXAMPLE = "Example: rollout-service submit tasks.jsonl --output results.jsonl --concurrency 64"

PATIENCE_SECONDS = 300.0
"""How long a server may be gone, as for a restart, before the command gives up."""


def command(
    tasks: Annotated[
        Path, typer.Argument(help="JSONL: a RolloutRequest a line.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL: a finished Rollout a line.")],
    environment: Annotated[
        str | None, typer.Option(help="The lines are instances of this environment, not requests.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Rollouts ordered at once.")] = 64,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the closing counts as JSON.")] = False,
) -> None:
    """Roll out every line of a file; run it again after any interruption, and only what is missing is done.

    A line that is no request is named by its number and the rest goes on; the exit code is then 1. A failed
    rollout is a result like any other: its line says why.
    """

    async def main() -> int:
        async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
            return await _submit(client, tasks, output, environment, concurrency, as_json=as_json)

    common.run(main)


async def _submit(
    client: RolloutClient,
    tasks: Path,
    output: Path,
    environment: str | None,
    concurrency: int,
    *,
    as_json: bool,
) -> int:
    from rollout_service.cli.jsonl import RequestFile, ResultFile
    from rollout_service.cli.progress import Tally

    refusals = _Refusals()
    requests = RequestFile(tasks, refusals.line, environment)
    refusals.lines = requests.lines
    try:
        with ResultFile(output) as results:
            tally = Tally(requests.count())
            resumed = await _roll_out(client, requests, results, concurrency, refusals, tally)
    except (OSError, ValueError) as error:
        raise common.CommandError(str(error), hint="name another file with --output.") from error
    _report(output, tally, resumed=resumed, refused=refusals.count, as_json=as_json)
    return 1 if refusals.count else 0


class _Refusals:
    """Says which lines give no result, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.lines: dict[str, int] = {}
        self._console = common.err()

    def line(self, number: int, why: str) -> None:
        """A line that is no request."""
        self.count += 1
        self._console.print(f"line {number}: {why}", markup=False)

    def request(self, request: RolloutRequest, error: ProblemError) -> None:
        """A request that the server refused."""
        self.line(self.lines[str(request.rollout_id)], error.problem.detail)


async def _roll_out(
    client: RolloutClient,
    requests: RequestFile,
    results: ResultFile,
    concurrency: int,
    refusals: _Refusals,
    tally: Tally,
) -> int:
    """Roll out what is not in the results yet; returns how many were there already."""
    from rollout_service.cli.progress import ProgressView

    total, resumed = tally.total, 0

    def missing() -> Iterator[RolloutRequest]:
        nonlocal resumed
        for request in requests:
            if request.rollout_id in results.done:
                resumed += 1
            else:
                yield request

    with ProgressView(common.err(), tally).shown() as view:
        async for rollout in client.run_all(missing(), concurrency=concurrency, refused=refusals.request):
            results.append(rollout)
            tally.add(rollout)
            tally.total = total - resumed - refusals.count
            view.update()
        tally.total = total - resumed - refusals.count
    return resumed


def _report(output: Path, tally: Tally, *, resumed: int, refused: int, as_json: bool) -> None:
    counts = {str(state): count for state, count in sorted(tally.ended.items())}
    if as_json:
        common.print_json({"output": str(output), "resumed": resumed, "refused": refused, "ended": counts})
        return
    parts = [f"{tally.count} results written to {output}"]
    if resumed:
        parts.append(f"{resumed} were there already")
    if refused:
        parts.append(f"{refused} lines gave none (see above)")
    common.err().print("; ".join(parts), markup=False)
