"""The engines, slots and sandboxes of one episode's sub-agents; implements `episodes.SubagentHost`.

Sub-agents take no place of the pipeline's stages, so an agent that waits for them holds up none. A sandbox of their own
is admitted from a place reserved as for graders, since an agent that has one may wait for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from api_schemas.rollouts import RolloutRequest, Sampling, TokenExtras
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import waits_for
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.engines.serving.session import without_secrets
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Policy, SubagentSlot
from rollout_service.pipeline.context import EpisodeContext
from rollout_service.tokens import ToolSpec
from sandboxes import Sandbox
from sandboxes.scheduling.admission import Purpose


class EpisodeSubagents:
    def __init__(
        self,
        context: EpisodeContext,
        policies: PolicyServing,
        request: RolloutRequest,
        spec: EnvironmentSpec,
        hidden: Collection[str],
    ) -> None:
        """Secrets of `hidden` are kept from sub-agents, also those added later."""
        self._context = context
        self._policies = policies
        self._request = request
        self._spec = spec
        self._hidden = hidden
        self._opened: dict[tuple[str, str], RolloutRequest] = {}

    def model(self, pool: str) -> str:
        return self._policies.model(pool)

    async def open(self, pool: str, tools: list[ToolSpec], *, agent: str, temperature: float) -> Policy:
        request = self._request.model_copy(
            update={
                "pool": pool,
                "rollout_id": f"{self._request.rollout_id}/{agent}",
                "sampling": Sampling(temperature=temperature),
                "exports": TokenExtras(),
            }
        )
        self._opened[pool, agent] = request
        return without_secrets(await self._policies.open(request, tools), self._hidden)

    def slot(self) -> AbstractAsyncContextManager[SubagentSlot]:
        return self._context.subagent_slots.slot(self._request.rollout_id or "")

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        with waits_for(StepKind.HOST):
            ticket = await self._context.admission.admit(Purpose.GRADER)
        try:
            with waits_for(StepKind.SANDBOX_START, self._spec.image or "") as step:
                sandbox = await self._context.sandboxes.start(self._spec, self._request.rollout_id or "")
                step.note(sandbox=sandbox.id)
            try:
                yield sandbox
            finally:
                with waits_for(StepKind.SANDBOX_END, sandbox=sandbox.id):
                    await sandbox.close()
        finally:
            ticket.release()

    def close(self) -> None:
        """Free the sub-agents' places on their backends; idempotent."""
        while self._opened:
            _, request = self._opened.popitem()
            self._policies.close(request)
