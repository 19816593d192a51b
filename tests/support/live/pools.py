"""Pools whose engines are scripted by functions of a request, for teachers and hints."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import NOTHING_RETURNED, GenerateRequest, Generation, ReturnedExtras
from rollout_service.engines.errors import NoBackendError
from rollout_service.engines.serving.policies import PoolModel
from rollout_service.tokens import ChatRenderer
from tests.support import samples

Answers = Callable[[GenerateRequest], ReturnedExtras]


def generation(extras: ReturnedExtras = NOTHING_RETURNED, *, version: int | None = 3) -> Generation:
    """Return an answer of one token, or of none."""
    some = [] if version is None else [1]
    return samples.generation(
        some,
        logprobs=[-0.1 for _ in some],
        versions=[] if version is None else [version],
        finish_reason=FinishReason.LENGTH,
        backend_id="engine",
        extras=extras,
    )


class FunctionEngines:
    """The engines of a pool, which answer as a function says."""

    def __init__(self, answer: Callable[[GenerateRequest], Generation]) -> None:
        self.answer = answer
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        return self.answer(request)

    def views(self) -> list[Any]:
        return [SimpleNamespace(backend_id="engine", model_path="models/teacher")]


class FunctionModels:
    """What pools serve, by their names."""

    def __init__(self, renderer: ChatRenderer, *, context_length: int = 4_096, **pools: FunctionEngines) -> None:
        self.pools = pools
        self.served = dict.fromkeys(pools, PoolModel(renderer, context_length))

    def connect(self, pool: str) -> tuple[PoolModel, FunctionEngines]:
        if pool not in self.pools:
            raise NoBackendError(f"pool {pool!r} has no backend")
        return self.served[pool], self.pools[pool]
