"""`rollout-service submit`: roll out the requests of a file, and write the results to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import DEFAULT_URL, Key, Url

if TYPE_CHECKING:
    from api_schemas.rollouts import RolloutRequest
    from rollout_client.client import ProblemError, RolloutClient
    from rollout_service.cli.submit.files import RequestFile, ResultFile
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
    from rollout_service.cli.submit.files import is_stream, reread

    async def submitted(submission: _Submission) -> int:
        async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
            counts = await _submit(client, submission)
        counts.report(output, as_json=as_json)
        return counts.exit_code(fail_on_error=fail_on_error)

    with reread(tasks) as file:
        prefix = STREAM if is_stream(tasks) else tasks.stem
        submission = _Submission(file, prefix, output, environment, concurrency)
        return common.run_coroutine(lambda: submitted(submission))


@dataclass(frozen=True, slots=True)
class _Submission:
    tasks: Path
    stem: str
    """The prefix of generated ids."""
    output: Path
    environment: str | None
    concurrency: int


@dataclass(frozen=True, slots=True)
class _Counts:
    tally: Tally
    resumed: int
    refused: int

    @property
    def unsuccessful(self) -> int:
        from api_schemas.rollouts import RolloutState

        return self.tally.count - self.tally.ended[RolloutState.COMPLETED]

    def exit_code(self, *, fail_on_error: bool) -> int:
        """Return 1 if lines gave no result, or, if asked, if rollouts failed."""
        return 1 if self.refused or (fail_on_error and self.unsuccessful) else 0

    def report(self, output: Path, *, as_json: bool) -> None:
        """Print the summary line, or the counts as JSON."""
        if as_json:
            ended = {str(state): count for state, count in sorted(self.tally.ended.items())}
            document = {"output": str(output), "resumed": self.resumed, "refused": self.refused}
            common.print_json(document | {"ended": ended})
            return
        parts = [f"{common.count(self.tally.count, 'result')} written to {output}"]
        if self.resumed:
            parts.append(f"{self.resumed} were already there")
        if self.refused:
            parts.append(f"{common.count(self.refused, 'line')} gave no result (see above)")
        if self.unsuccessful:
            parts.append(f"{self.unsuccessful} failed or cancelled (see `error` in their lines)")
        common.err().print("; ".join(parts), soft_wrap=True)


async def _submit(client: RolloutClient, submission: _Submission) -> _Counts:
    from rollout_service.cli.submit.files import RequestFile, ResultFile
    from rollout_service.cli.submit.progress import Tally

    rejected = _RejectedLines()
    requests = RequestFile(submission.tasks, rejected.line, submission.environment, submission.stem)
    rejected.lines = requests.lines
    lines = requests.count()
    if not lines:
        raise common.CommandError(f"{submission.tasks} is empty", hint="Write one request per line.")
    tally = Tally(lines)
    try:
        with ResultFile(submission.output) as results, _explain_resuming(submission.output):
            resumed = await _roll_out(client, requests, results, submission.concurrency, rejected, tally)
    except (OSError, ValueError) as error:
        raise common.CommandError(str(error), hint="Name another file with --output.") from error
    return _Counts(tally, resumed, rejected.count)


@contextmanager
def _explain_resuming(output: Path) -> Iterator[None]:
    """Tell the user after Ctrl-C or SIGTERM that nothing is lost."""
    import anyio

    try:
        yield
    except anyio.get_cancelled_exc_class():
        text = f"Interrupted. Finished results are in {output}; run the same command again to continue."
        common.err().print(text, soft_wrap=True)
        raise


class _RejectedLines:
    """Reports and counts the lines that give no result."""

    def __init__(self) -> None:
        self.count = 0
        self.lines: dict[str, int] = {}
        self._console = common.err()

    def line(self, number: int, why: str) -> None:
        self.count += 1
        self._console.print(f"line {number}: {why}", soft_wrap=True)

    def request(self, request: RolloutRequest, error: ProblemError) -> None:
        """Report a request that the server refused."""
        self.line(self.lines[str(request.rollout_id)], error.problem.detail)


async def _roll_out(
    client: RolloutClient,
    requests: RequestFile,
    results: ResultFile,
    concurrency: int,
    rejected: _RejectedLines,
    tally: Tally,
) -> int:
    """Roll out the tasks that are not in the results yet, and return how many were already there."""
    from rollout_service.cli.submit.progress import ProgressView, explain_waiting

    total, resumed = tally.total, 0

    def missing() -> Iterator[RolloutRequest]:
        nonlocal resumed
        for request in requests:
            if request.rollout_id in results.done:
                resumed += 1
            else:
                yield request

    with ProgressView(common.err(), tally).shown() as view:
        async with explain_waiting(client, view):
            async for rollout in client.run_all(missing(), concurrency=concurrency, refused=rejected.request):
                results.append(rollout)
                tally.add(rollout)
                tally.total = total - resumed - rejected.count
                view.update()
        tally.total = total - resumed - rejected.count
    return resumed
