"""A scripted sampler, for judges and other models that are asked for texts."""

from collections.abc import Sequence

import anyio

from api_schemas.trajectories import Message
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.errors import NoBackendError
from rollout_service.judging.contract import SampledText

Said = str | Exception | anyio.Event | None


class ScriptedSampler:
    """Says its texts in turn, from the first again after the last; implements `TextSampler`.

    It raises errors, says its last text after an event, and hangs where there is None.
    """

    def __init__(self, *says: Said, truncated: bool = False, tokens: int = 2, name: str = "judge@1") -> None:
        self.says, self.truncated, self.tokens, self.name = says, truncated, tokens, name
        self.prompts: list[list[Message]] = []
        self.asked_for: list[tuple[str, int, float]] = []
        """The pool, the budget and the temperature of each request."""
        self.asked = ChangeSignal()
        self.at_once = self.most_at_once = 0
        self.is_served = True

    def model(self, pool: str) -> str:
        if not self.is_served:
            raise NoBackendError(f"pool {pool!r} has no backend")
        return self.name

    async def sample(
        self, pool: str, messages: Sequence[Message], *, max_tokens: int, temperature: float
    ) -> SampledText:
        said = self.says[len(self.prompts) % len(self.says)]
        self.prompts.append(list(messages))  # the conversation goes on
        self.asked_for.append((pool, max_tokens, temperature))
        self.asked.notify()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if said is None:
                await anyio.sleep_forever()
            if isinstance(said, anyio.Event):
                await said.wait()
                said = self.says[-1]
            await anyio.lowlevel.checkpoint()
        finally:
            self.at_once -= 1
        if isinstance(said, Exception):
            raise said
        return SampledText(str(said), self.truncated, prompt_tokens=50, sampled_tokens=self.tokens)
