"""What the sub-agents of one episode run on; implements `episodes.SubagentHost`.

Guarantees: sub-agents take no place of the pipeline's stages, so an agent that waits for them holds up none of them; a
sandbox of their own is admitted as a grader's is, from a reserved place, since an agent that has one may wait for it;
`close` frees what the pool keeps for the episode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from api_schemas.rollouts import RolloutRequest, Sampling, TokenExtras
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import waits_for
from rollout_service.engines.serving.masked import without_secrets
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Policy, SubagentSlot
from rollout_service.pipeline.context import AttemptContext, PolicyFactory
from rollout_service.pipeline.fair_slots import DEFAULT_SUBAGENT_SLOTS, FairSlots
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.tokens import ToolSpec
from sandboxes import Sandbox
from sandboxes.scheduling.admission import Purpose


class TrialSubagents:
    """The pools, slots and sandboxes for the sub-agents of an episode outside the service."""

    def __init__(
        self,
        policies: PolicyFactory,
        sandboxes: SandboxSource,
        request: RolloutRequest,
        spec: EnvironmentSpec,
        hidden: Collection[str] = (),
    ) -> None:
        """Keep the secrets of `hidden` from sub-agents, also those that are added later."""
        self._policies = policies
        self._sandboxes = sandboxes
        self._request = request
        self._spec = spec
        self._hidden = hidden
        self._slots = FairSlots(DEFAULT_SUBAGENT_SLOTS)
        self._opened: dict[tuple[str, str], RolloutRequest] = {}
        """The requests that stand for each agent at its pool."""

    def model(self, pool: str) -> str:
        """Return the model that a pool serves."""
        return self._policies.model(pool)

    async def open(self, pool: str, tools: list[ToolSpec], *, agent: str, temperature: float) -> Policy:
        """Open a conversation with a pool."""
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
        """Wait for a slot, which is held within the block."""
        return self._slots.slot(self._request.rollout_id or "")

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """Start a sandbox of the environment's image, which ends with the block."""
        with waits_for(StepKind.SANDBOX_START, self._spec.image or "") as step:
            sandbox = await self._sandboxes.start(self._spec, self._request.rollout_id or "")
            step.note(sandbox=sandbox.id)
        try:
            yield sandbox
        finally:
            with waits_for(StepKind.SANDBOX_END, sandbox=sandbox.id):
                await sandbox.close()

    def close(self) -> None:
        """Forget which backends the sub-agents belong to; idempotent."""
        while self._opened:
            _, request = self._opened.popitem()
            self._policies.close(request)


class EpisodeSubagents(TrialSubagents):
    """Those for an episode in the service, with its slots and its admission."""

    def __init__(
        self,
        context: AttemptContext,
        request: RolloutRequest,
        spec: EnvironmentSpec,
        hidden: Collection[str] = (),
    ) -> None:
        super().__init__(context.policies, context.sandboxes, request, spec, hidden)
        self._slots = context.subagent_slots
        self._admission = context.admission

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """Start a sandbox once it is admitted."""
        with waits_for(StepKind.HOST):
            ticket = await self._admission.admit(Purpose.GRADER)
        try:
            async with super().sandbox() as sandbox:
                yield sandbox
        finally:
            ticket.release()
