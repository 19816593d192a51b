"""One order to many backends at once, and what each of them made of it."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from api_schemas.inference import BackendOutcome
from rollout_service.inference.contract import Backend
from rollout_service.inference.errors import InferenceError
from rollout_service.inference.member import Member

Order = Callable[[Backend], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an order at one backend."""

    seconds: float
    error: InferenceError | None

    def outcome(self, backend_id: str) -> BackendOutcome:
        """The answer as the API shows it."""
        return BackendOutcome(
            backend_id=backend_id,
            ok=self.error is None,
            seconds=self.seconds,
            error=str(self.error) if self.error else None,
        )


async def tell_all(members: Sequence[Member], order: Order) -> list[tuple[Member, Answer]]:
    """Carry out `order` at every backend; an error of one is its answer, counted, and stops no other."""
    answers: dict[Member, Answer] = {}

    async def tell(member: Member) -> None:
        started = time.perf_counter()
        error: InferenceError | None = None
        try:
            await order(member.backend)
        except InferenceError as caught:
            error = caught
            member.failed(caught)
        answers[member] = Answer(time.perf_counter() - started, error)

    async with anyio.create_task_group() as tasks:
        for member in members:
            tasks.start_soon(tell, member)
    return [(member, answers[member]) for member in members]
