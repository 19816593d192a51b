"""`rollout-service submit`: roll out the requests of a file, and write the results to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import DEFAULT_URL, Key, Url

if TYPE_CHECKING:
    from api_schemas.rollouts import RolloutRequest
    from rollout_client.client import ProblemError, RolloutClient
    from rollout_service.cli.submit.files import RequestFile
    from rollout_service.cli.submit.progress import Tally

EXAMPLE = "Example: rollout-service submit tasks.jsonl --output results.jsonl --concurrency 64"

STREAM = "tasks"
"""The prefix of ids for requests from a stream, whose name changes between calls."""
PATIENCE_SECONDS = 300.0
"""How long a server may be unreachable, such as during a restart, before the command gives up."""


@common.command
def command(
    tasks: Annotated[
        Path,
        typer.Argument(
            help="JSONL file with one RolloutRequest per line; - or a pipe is read to its end first.",
            dir_okay=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="JSONL file for the results, one finished Rollout per line."),
    ],
    environment: Annotated[
        str | None,
        typer.Option(
            help="Treat the lines as instances of this environment instead of requests.",
            autocompletion=completion.environments,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Rollouts submitted at once.")] = 64,
    fail_on_error: Annotated[
        bool, typer.Option("--fail-on-error", help="Exit with 1 if a rollout failed or was cancelled.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final counts as JSON.")] = False,
) -> int | None:
    """Roll out every line of a file; after an interruption, run it again to do only the missing ones.

    Lines that are not valid requests are reported by number; the rest still run, and the exit code is 1. A failed
    rollout is a result too, and its line says why; with --fail-on-error it also makes the exit code 1.
    """
    from rollout_service.cli.submit.files import RequestFile, is_stream, reread

    rejected = _RejectedLines()

    async def submitted(requests: RequestFile) -> int:
        async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
            tally, resumed = await _submit(client, requests, output, concurrency, rejected)
        _report(tally, output, resumed=resumed, refused=rejected.count, as_json=as_json)
        return 1 if rejected.count or (fail_on_error and tally.unsuccessful) else 0

    with reread(tasks) as file:
        stem = STREAM if is_stream(tasks) else tasks.stem
        requests = RequestFile(file, stem, rejected.line, environment)
        rejected.lines = requests.lines
        return common.run_coroutine(lambda: submitted(requests))


class _RejectedLines:
    def __init__(self) -> None:
        self.count = 0
        self.lines: dict[str, int] = {}

    def line(self, number: int, why: str) -> None:
        self.count += 1
        common.err().print(f"line {number}: {why}", soft_wrap=True)

    def request(self, request: RolloutRequest, error: ProblemError) -> None:
        self.line(self.lines[str(request.rollout_id)], error.problem.detail)


async def _submit(
    client: RolloutClient,
    requests: RequestFile,
    output: Path,
    concurrency: int,
    rejected: _RejectedLines,
) -> tuple[Tally, int]:
    """Roll out tasks that are not in the output; return how they ended, and how many were there."""
    from rollout_service.cli.submit.files import ResultFile
    from rollout_service.cli.submit.progress import ProgressView, Tally, explain_waiting

    total, resumed = requests.count(), 0
    if not total:
        raise common.CommandError(f"{requests.path} is empty", hint="Write one request per line.")
    tally = Tally(total)

    def missing(done: set[str]) -> Iterator[RolloutRequest]:
        nonlocal resumed
        for request in requests:
            if request.rollout_id in done:
                resumed += 1
            else:
                yield request

    try:
        with (
            ResultFile(output) as results,
            _explain_resuming(output),
            ProgressView(common.err(), tally).shown() as view,
        ):
            new = missing(results.done)
            async with explain_waiting(client, view, requests.pools):
                async for rollout in client.run_all(new, concurrency=concurrency, refused=rejected.request):
                    results.append(rollout)
                    tally.add(rollout)
                    tally.total = total - resumed - rejected.count
                    view.update()
            tally.total = total - resumed - rejected.count
    except (OSError, ValueError) as error:
        raise common.CommandError(str(error), hint="Name another file with --output.") from error
    return tally, resumed


@contextmanager
def _explain_resuming(output: Path) -> Iterator[None]:
    """After Ctrl-C or SIGTERM, say that nothing is lost."""
    import anyio

    try:
        yield
    except anyio.get_cancelled_exc_class():
        text = f"Interrupted. Finished results are in {output}; run the same command again to continue."
        common.err().print(text, soft_wrap=True)
        raise


def _report(tally: Tally, output: Path, *, resumed: int, refused: int, as_json: bool) -> None:
    if as_json:
        ended = dict(sorted(tally.ended.items()))
        common.print_json({"output": output, "resumed": resumed, "refused": refused, "ended": ended})
        return
    parts = [f"{common.count(tally.count, 'result')} written to {output}"]
    if resumed:
        parts.append(f"{resumed} were already there")
    if refused:
        parts.append(f"{common.count(refused, 'line')} gave no result (see above)")
    if tally.unsuccessful:
        parts.append(f"{tally.unsuccessful} failed or cancelled (see `error` in their lines)")
    common.err().print("; ".join(parts), soft_wrap=True)
