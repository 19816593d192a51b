"""Makes the judge of served turns from the settings, and the teacher.

Guarantee: a prompt, a rule or a setting that cannot be used is refused before anything is served.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread

from rollout_service.base.errors import NotFoundError
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.judging.contract import Judge
from rollout_service.live.contract import LiveStore, TurnRecord
from rollout_service.live.judging.hindsight import JudgedHints, PromptOf, RecordedPrompt
from rollout_service.live.judging.overrides import Overrides
from rollout_service.live.judging.prompt import hint_rubric, value_rubric
from rollout_service.live.judging.stage import JudgeObserver, JudgeStage
from rollout_service.live.judging.teacher import TeacherReader
from rollout_service.live.judging.turn_judge import TurnJudge
from rollout_service.live.replay import prompt_of
from rollout_service.settings.live import LiveJudgeSettings


async def make_judge_stage(
    settings: LiveJudgeSettings,
    store: LiveStore,
    judge: Judge,
    serving: PolicyServing,
    observers: Sequence[JudgeObserver] = (),
) -> JudgeStage:
    """Return the stage, which begins to work with `running`.

    Raises:
        ConfigurationError: A prompt, a rule or a setting cannot be used.
    """

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
            )
        return TurnJudge(judge, value_rubric(settings), Overrides.load(settings.overrides), hints)

    return JudgeStage(
        store,
        await anyio.to_thread.run_sync(make),  # it reads files, and imports plug-ins
        serving,
        at_once=settings.at_once,
        queue=settings.queue,
        observers=observers,
    )


def make_teacher(settings: LiveJudgeSettings, serving: PolicyServing) -> TeacherReader:
    """Return the reader of recorded answers, for runs that ask for a teacher."""
    return TeacherReader(serving, settings.teacher_pool)


def recorded_prompts(store: LiveStore, serving: PolicyServing) -> PromptOf:
    """Return what finds a turn's prompt in the store."""

    async def find(turn: TurnRecord) -> RecordedPrompt:
        session = await store.session(turn.session_id)
        if session is None:
            raise NotFoundError("the session was deleted meanwhile")
        renderer = serving.connect(session.pool)[0].renderer
        turns = await store.turns(turn.session_id)
        return RecordedPrompt(
            session.pool, await anyio.to_thread.run_sync(prompt_of, renderer, turns, turn.turn)
        )

    return find
