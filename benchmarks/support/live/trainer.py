"""A trainer of live sessions: it leases and acknowledges batches, loads new versions, and checks what it gets.

Guarantee: each usable turn of each batch is counted, and its tokens are compared with what its user got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import anyio
from programs.live_engines import MODEL
from support.live.users import Clock, User
from tokenizers import Tokenizer

from api_schemas.rollouts import Rollout
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.runs.live import LiveDelivery
from rollout_client.client import GoneError, RolloutClient

BATCH_SIZE = 8
CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class Trainer:
    """What was delivered."""

    client: RolloutClient
    clock: Clock
    delivered: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each turn was delivered, by its session and number."""
    wrong: list[str] = field(default_factory=list)
    """Turns whose tokens, text or versions are not those that their user got."""
    batches: int = 0
    _rollouts: list[Rollout] = field(default_factory=list)
    _unread: Counter[str] = field(default_factory=Counter)
    """How many turns were delivered that their user did not read, by session."""
    _tokenizer: Tokenizer = field(default_factory=lambda: Tokenizer.from_file(str(MODEL / "tokenizer.json")))

    async def train(self) -> None:
        """Lease and acknowledge until the run ends."""
        source = InlineTasks(tasks=[], open=True)
        live = LiveDelivery(close_turns=4, close_seconds=CLOSE_SECONDS, max_user_share=1.0, max_session_share=1.0)
        run = await self.client.create_run(
            RunRequest(source=source, live=live, group_size=1, batch_size=BATCH_SIZE, filters=[])
        )
        try:
            async for batch in run.batches():
                self.batches += 1
                for group in batch.groups:
                    self._rollouts += [sample.rollout for sample in group.samples]
        except GoneError:
            return

    async def update(self, seconds: float) -> None:
        """Load a new version every so many seconds."""
        while True:
            await anyio.sleep(seconds)
            self.clock.ordered += 1
            await self.client.update_weights(str(MODEL), self.clock.ordered)
            self.clock.loaded = self.clock.ordered

    def check(self, users: Mapping[str, User]) -> None:
        """Compare what was delivered with what the users got."""
        for rollout in self._rollouts:
            if rollout.session is None or rollout.trajectory is None:
                self.wrong.append(f"{rollout.rollout_id} is not a part of a session")
                continue
            user = users[rollout.session.session_id]
            for segment in rollout.trajectory.segments:
                rows = zip(segment.turn_ids, segment.token_ids, segment.versions, segment.loss_mask, strict=True)
                trained = (row for row in rows if row[3])
                for turn, tokens in groupby(trained, key=itemgetter(0)):
                    self.delivered[user.session_id, turn] += 1
                    self._check(user, turn, [(token, version) for _, token, version, _ in tokens])
        self._rollouts.clear()

    def _check(self, user: User, turn: int, tokens: list[tuple[int, int]]) -> None:
        text = self._tokenizer.decode([token for token, _ in tokens]).strip()
        answer = user.answer(turn, text)
        if answer is None:
            self._unread[user.session_id] += 1
            if self._unread[user.session_id] > user.lost:  # a lost answer may have been recorded
                self.wrong.append(f"turn {turn} of {user.session_id}: {text!r} was not read")
            return
        versions = [version for _, version in tokens]
        if min(versions) < answer.oldest or max(versions) > answer.newest:
            window = f"{answer.oldest} to {answer.newest}"
            self.wrong.append(f"turn {turn} of {user.session_id}: versions {set(versions)}, not {window}")
