"""Makes the judge of served turns from the settings, and the teacher.

A prompt, a rule or a setting that cannot be used is refused before anything is served.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal

import anyio
import anyio.to_thread
import structlog

from api_schemas.rollouts.sessions import Hint
from api_schemas.trajectories import Message
from rollout_service.base.errors import NotFoundError, ServiceError, describe
from rollout_service.engines.contract import (
    GenerateRequest,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.errors import BackendProtocolError, NoBackendError
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.judging.contract import Judge, Vote
from rollout_service.judging.rubric import Rubric, without_reasoning
from rollout_service.live.contract import TurnRecord
from rollout_service.live.judging.overrides import Overrides
from rollout_service.live.judging.stage import (
    USABLE,
    FoundHint,
    JudgeStage,
    OnMark,
    TurnJudge,
    hint_rubric,
    outage,
    question,
    value_rubric,
)
from rollout_service.live.judging.teacher import share_vocabulary
from rollout_service.live.replay import TurnPrompt, prompt_of
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveJudgeSettings
from sandboxes.task_groups import open_task_group


async def make_judge_stage(
    settings: LiveJudgeSettings,
    store: SqliteLiveStore,
    judge: Judge,
    serving: PolicyServing,
    on_mark: OnMark,
) -> JudgeStage:
    def make() -> TurnJudge:
        hints = None
        if settings.hints:
            hints = JudgedHints(
                judge,
                hint_rubric(settings),
                recorded_prompts(store, serving),
                serving,
                selection=settings.hint_selection,
                teacher_pool=settings.teacher_pool,
            ).find
        return TurnJudge(judge, value_rubric(settings), Overrides.load(settings.overrides), hints)

    return JudgeStage(
        store,
        await anyio.to_thread.run_sync(make),  # it reads files, and imports plug-ins
        serving,
        at_once=settings.at_once,
        queue=settings.queue,
        on_mark=on_mark,
    )


def recorded_prompts(store: SqliteLiveStore, serving: PolicyServing) -> PromptOf:

    async def find(turn: TurnRecord) -> RecordedPrompt:
        session = await store.session(turn.session_id)
        if session is None:
            raise NotFoundError("the session was deleted meanwhile")
        renderer = serving.connect(session.pool)[0].renderer
        turns = await store.turns(turn.session_id)
        return RecordedPrompt(session.pool, await anyio.to_thread.run_sync(prompt_of, renderer, turns, turn.turn))

    return find


log = structlog.get_logger(__name__)

HEADER: Final = "[user's hint / instruction]"
"""The line above a hint in the last user message."""
TOO_SHORT: Final = 10
"""In characters; such hints are not sentences."""
LONGEST: Final = 2_000
"""In characters; longer hints are passed over."""
CANDIDATES: Final = 3
"""The shortest hints, whose overlap is measured."""
_HINT = re.compile(r"\[HINT_START\]((?:(?!\[HINT_(?:START|END)\]).)*)\[HINT_END\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A turn's prompt, and the pool that sampled it."""

    pool: str
    prompt: TurnPrompt


PromptOf = Callable[[TurnRecord], Awaitable[RecordedPrompt]]
"""Raises a ServiceError if it is not known."""


@dataclass(frozen=True, slots=True)
class JudgedHints:
    """Hints in hindsight: what the next state tells about what an answer should have been.

    A hint is between marks that the judge wrote in its own answer, and comes from a vote that says that there is one.
    The augmented prompt is rendered by the policy's own chat format from the recorded messages. Whatever fails, the
    turn keeps its value and the mark says why there is no hint.
    """

    judge: Judge
    rubric: Rubric
    prompt_of: PromptOf
    serving: PolicyServing
    _: KW_ONLY
    selection: Literal["longest", "overlap"] = "longest"
    teacher_pool: str | None = None

    async def find(self, turn: TurnRecord) -> FoundHint:
        """Return the selected hint, or why there is none; never raise."""
        try:
            return await self._find(turn)
        except ServiceError as error:
            return FoundHint(None, describe(error).code)
        except Exception as error:  # noqa: BLE001 - a hint must not cost the turn its value
            log.error(
                "a hint could not be made",
                session_id=turn.session_id,
                turn=turn.turn,
                error=type(error).__name__,  # its message may quote the turn
                hint="Check the prompt for hints.",
            )
            return FoundHint(None, "internal_error")

    async def _find(self, turn: TurnRecord) -> FoundHint:
        if turn.next_state is None:
            return FoundHint(None, "no_next_state")
        instance, texts = question(turn.answer, turn.next_state)
        try:
            poll = await self.judge.poll(self.rubric, instance, texts, keep_texts=True)
        except NoBackendError as error:
            return FoundHint(None, error.code, away=error)
        if (failure := outage(poll.votes)) is not None:
            return FoundHint(None, "judge_failed", away=failure)
        proposed = candidates(poll.votes)
        if not proposed:
            valid = any(vote.label is not None for vote in poll.votes)
            return FoundHint(None, "no_hint" if valid else "judge_failed")
        recorded = await self.prompt_of(turn)
        hinted = await anyio.to_thread.run_sync(self._augment_all, recorded, proposed)
        if not hinted:
            return FoundHint(None, "no_user_message")
        chosen = await self._select(recorded, proposed, hinted)
        if chosen is None:
            return FoundHint(None, "other_vocabulary")
        return FoundHint(
            Hint(
                text=proposed[chosen],
                prompt_ids=hinted[chosen],
                candidates=len(proposed),
                selected_by=self.selection,
            )
        )

    def _augment_all(self, recorded: RecordedPrompt, hints: Sequence[str]) -> list[list[int]]:
        """Return no prompts if no user message can have a hint. Slow for a long prompt."""
        renderer = self.serving.connect(recorded.pool)[0].renderer
        prompts: list[list[int]] = []
        for hint in hints:
            messages = with_hint(recorded.prompt.messages, hint)
            if messages is None:
                return []
            prompts.append(renderer.render(messages, recorded.prompt.tools))
        return prompts

    async def _select(
        self, recorded: RecordedPrompt, hints: Sequence[str], hinted: Sequence[Sequence[int]]
    ) -> int | None:
        """Return None if the teacher cannot read the policy's ids."""
        longest = max(range(len(hints)), key=lambda number: len(hints[number]))
        if self.selection == "longest" or len(hints) == 1:
            return longest
        compared = sorted(range(len(hints)), key=lambda number: len(hints[number]))[:CANDIDATES]
        policy, policy_engines = self.serving.connect(recorded.pool)
        teacher, teacher_engines = self.serving.connect(self.teacher_pool or recorded.pool)
        if not share_vocabulary(policy, teacher, recorded.prompt.output_ids):
            return None
        scores = await overlaps(
            policy_engines,
            teacher_engines,
            recorded.prompt.prompt_ids,
            [hinted[number] for number in compared],
            recorded.prompt.output_ids,
        )
        return compared[max(range(len(scores)), key=scores.__getitem__)]


def candidates(votes: Iterable[Vote]) -> list[str]:
    """Return the different hints of votes that say that there is one, in their order."""
    found: dict[str, str] = {}
    for vote in votes:
        said = without_reasoning(vote.text) if vote.label == USABLE else None
        blocks = _HINT.findall(said or "")
        hint = blocks[-1].strip() if blocks else ""
        if TOO_SHORT < len(hint) <= LONGEST:
            found.setdefault(" ".join(hint.casefold().split()), hint)
    return list(found.values())


def with_hint(messages: Sequence[Message], hint: str) -> list[Message] | None:
    """Add the hint to the last user message; return None if there is none."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place].role == "user":
            content = f"{messages[place].content}\n\n{HEADER}\n{hint}".lstrip("\n")
            edited = messages[place].model_copy(update={"content": content})
            return [*messages[:place], edited, *messages[place + 1 :]]
    return None


TOP: Final = 4
POSITIONS: Final = 64
"""Spread evenly over a longer answer: each costs a request for one token."""
AT_ONCE: Final = 8


async def overlaps(
    policy: BackendPool,
    teacher: BackendPool,
    prompt_ids: Sequence[int],
    hinted: Sequence[Sequence[int]],
    sampled_ids: Sequence[int],
) -> list[int]:
    """Sum for each hint, over positions of the recorded answer, the likeliest tokens that both expect next.

    Both read the same recorded tokens: the policy without the hint, and the teacher with it.
    """
    places = positions(len(sampled_ids))
    limit = anyio.CapacityLimiter(AT_ONCE)
    found: dict[tuple[int, int], frozenset[int]] = {}

    async def look(number: int, place: int, engines: BackendPool, prompt: Sequence[int]) -> None:
        async with limit:
            found[number, place] = await likeliest(engines, [*prompt, *sampled_ids[:place]])

    async with open_task_group() as tasks:
        for place in places:
            tasks.start_soon(look, -1, place, policy, prompt_ids)
            for number, prompt in enumerate(hinted):
                tasks.start_soon(look, number, place, teacher, prompt)
    return [sum(len(found[-1, place] & found[number, place]) for place in places) for number in range(len(hinted))]


def positions(length: int) -> list[int]:
    count = min(length, POSITIONS)
    return [number * length // count for number in range(count)]


async def likeliest(engines: BackendPool, ids: Sequence[int]) -> frozenset[int]:
    """Ask for the likeliest tokens after these ids.

    Raises:
        InferenceError: The engine does not return them, or does not answer.
    """
    request = GenerateRequest(
        new_request_id(), list(ids), SamplingOptions(max_new_tokens=1), RequestedExtras(top_logprobs=TOP)
    )
    top = (await engines.generate(request)).extras.top_logprobs
    if not top:
        raise BackendProtocolError("the engine sampled nothing, so it has no likeliest tokens")
    return frozenset(each.token_id for each in top[0])
