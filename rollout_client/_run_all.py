"""Many rollouts at once, each given once, in the order in which they end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from api_schemas.rollouts import Rollout, RolloutRequest
from rollout_client.errors import ConflictError, InvalidRequestError, NotFoundError, ProblemError

Run = Callable[[RolloutRequest], Awaitable[Rollout]]
Refused = Callable[[RolloutRequest, ProblemError], None]
"""Takes a request that the server refuses, with its reason."""


async def run_all(
    run: Run, tasks: TaskGroup, requests: Iterator[RolloutRequest], concurrency: int, refused: Refused | None
) -> AsyncGenerator[Rollout]:
    """Yield the results of `run` as they come; workers in `tasks` call it until the generator is closed."""
    results, answers = anyio.create_memory_object_stream[Rollout | Exception](0)
    scope = anyio.CancelScope()
    tasks.start_soon(_run_workers, scope, run, requests, results, concurrency, refused)
    try:
        async for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        scope.cancel()
        answers.close()


async def _run_workers(
    scope: anyio.CancelScope,
    run: Run,
    requests: Iterator[RolloutRequest],
    results: MemoryObjectSendStream[Rollout | Exception],
    concurrency: int,
    refused: Refused | None,
) -> None:
    async def work() -> None:
        try:
            for request in requests:
                if (rollout := await _run_unless_refused(run, request, refused)) is not None:
                    await results.send(rollout)
        except Exception as error:  # noqa: BLE001 - nothing is hidden: the caller's loop raises it
            await results.send(error)

    with scope:
        async with results, anyio.create_task_group() as workers:
            for _ in range(concurrency):
                workers.start_soon(work)


async def _run_unless_refused(run: Run, request: RolloutRequest, refused: Refused | None) -> Rollout | None:
    try:
        return await run(request)
    except (InvalidRequestError, NotFoundError, ConflictError) as error:
        if refused is None:
            raise
        refused(request, error)
        return None
