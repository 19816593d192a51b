"""The router that reckons: a request goes where it is expected to cost the least time.

The cost of a request on an engine is the sum of

- *wait*: until the engine has read the prompts that were sent to it before;
- *prefill*: of the tokens that the engine is not expected to hold, once for who waits for them and once for each
  request that it works on, since reading a prompt holds up all of them;
- *move*: nothing at home; elsewhere a part of a turn, so that rollouts do not wander for little;
- *crowd*: what this rollout and the others that live there are expected to slow each other by, in this turn and, where
  it has no home yet, in those to come. A rollout that waits for a tool counts, because it will be back.

An engine that has clearly more rollouts than its fair part is given no further ones to live there.

So the turns of a rollout stay where their prefix is, since elsewhere all of it would have to be read again; the samples
of a group share their prompt as long as this is worth more than an even spread; and a rollout moves once its home
is so much busier that reading its prompt anew is quicker.

What engines hold, their rates and the length of rollouts are learned; see `engine`, `rates`, `prefixes`. A decision
takes time that grows with the logarithm of the prompt and with the number of candidates; only what a conversation
gained is hashed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_service.inference.contract import BackendLoad, GenerateRequest, Generation
from rollout_service.inference.routing.block_hashes import BLOCK_TOKENS, Chains, extend_chain
from rollout_service.inference.routing.contract import Candidate, Cost, Decision, Reason
from rollout_service.inference.routing.engine_model import Engine
from rollout_service.inference.routing.rates import Rates
from rollout_service.inference.routing.workload import Habits, Rollout

_EQUAL = 0.02
"""Costs that differ by this part are equal: then the home wins, an engine on this node, the one that rested longest."""
_EQUAL_SECONDS = 1e-4
_MOVE = 0.25
"""The part of a turn that a move has to save: expectations are as wrong as that, and KV in two places is room lost."""
_FREELY, _UNFAIR = 6, 1.05
"""Rollouts that may live on an engine whatever the others have; beyond, up to this factor of its fair part."""


@dataclass(slots=True)
class _Sent:
    engine: Engine
    chain: list[int]
    at: float
    wait: float
    others: int


class CostRouter:
    """Chooses by expected cost; `clock` gives seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, Engine] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._sent: dict[Decision, _Sent] = {}
        self._unsettled: tuple[Decision, list[int], float, float] | None = None
        """The last decision, of which its engine has not been told yet, with chain, wait and time."""
        self._chains = Chains()
        self._habits = Habits()
        self._rates = Rates()
        self._decisions = 0

    def choose(
        self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None
    ) -> Decision:
        self.settle()
        now = self._clock()
        chain = self._chains.of(request.input_ids, affinity)
        rollout = self._rollouts.get(affinity) if affinity is not None else None
        costs = [
            self._cost(each, chain, len(request.input_ids), affinity, rollout, now) for each in candidates
        ]
        is_new = affinity is not None and rollout is None
        best = self._best(candidates, self._with_room(candidates, costs) if is_new else costs, rollout)
        decision = Decision(
            backend_id=best.backend_id,
            reason=_reason(costs, best, rollout),
            affinity=affinity,
            prompt_tokens=len(request.input_ids),
            held_tokens=best.held_tokens,
            costs=tuple(costs),
        )
        self._unsettled = (decision, chain, best.wait, now)
        return decision

    def settle(self) -> None:
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            self._send(*unsettled)

    def ended(self, decision: Decision, request: GenerateRequest, answer: Generation | None) -> None:
        self.settle()
        sent = self._sent.pop(decision)
        now = self._clock()
        sent.engine.end(now)
        if answer is None or not answer.output_ids:
            return
        sent.engine.correct(sent.chain, decision.held_tokens, answer.cached_tokens, sent.at)
        uncached = len(request.input_ids) - answer.cached_tokens
        sampled = len(answer.output_ids)
        others = (sent.others + sent.engine.busy(now)) / 2
        sent.engine.learn(uncached, sampled, others, max(0.0, answer.engine_seconds - sent.wait))
        rollout = self._rollouts.get(decision.affinity) if decision.affinity is not None else None
        if rollout is not None and rollout.turns > 1:
            self._habits.later_turn(uncached, sampled)
        # The last sampled token has not been read: its KV is not there.
        chain = extend_chain(sent.chain, [*request.input_ids, *answer.output_ids[:-1]])
        self._chains.keep(chain, decision.affinity)
        sent.engine.prefixes.hold(chain, served_at=now)

    def observe(self, backend_id: str, load: BackendLoad) -> None:
        self.settle()
        self._engine(backend_id).observe(load, self._clock())

    def release(self, affinity: str) -> None:
        self.settle()
        self._chains.drop(affinity)
        rollout = self._rollouts.pop(affinity, None)
        if rollout is None:
            return
        self._habits.end(rollout)
        if rollout.home in self._engines:
            self._engines[rollout.home].leave(affinity)

    def forget(self, backend_id: str) -> None:
        self.settle()
        self._engines.pop(backend_id, None)

    def _engine(self, backend_id: str) -> Engine:
        if backend_id not in self._engines:
            self._engines[backend_id] = Engine(common_rates=self._rates)
        return self._engines[backend_id]

    def _cost(
        self,
        candidate: Candidate,
        chain: Sequence[int],
        tokens: int,
        affinity: str | None,
        rollout: Rollout | None,
        now: float,
    ) -> Cost:
        engine = self._engine(candidate.backend_id)
        # Of a prompt that is held whole, engines still read the last token.
        held = min(engine.prefixes.match(chain) * BLOCK_TOKENS, tokens - 1)
        rates, habits = self._rates, self._habits
        # Seconds that another's turn takes from this one, and this from that: what is read, and the larger batch.
        work = 2.0 * (habits.uncached * rates.prefill + habits.sampled * rates.crowding) * engine.slowness
        others, later = self._others(engine, affinity, now)
        # One that has a home would not stay away from it for good, so only this turn is weighed.
        met = others if rollout is not None else others + later * max(0.0, habits.turns - 1)
        is_move = rollout is not None and rollout.home != candidate.backend_id
        return Cost(
            backend_id=candidate.backend_id,
            held_tokens=held,
            wait=engine.wait(now),
            prefill=(1 + engine.busy(now)) * (tokens - held) * engine.prefill_rate,
            move=_MOVE * rates.expected(habits.uncached, habits.sampled, others) if is_move else 0.0,
            crowd=((met + habits.presence) / candidate.share - habits.presence) * work,
        )

    def _others(self, engine: Engine, affinity: str | None, now: float) -> tuple[float, float]:
        """How many requests run beside one, in this turn and in later ones: those of now end, residents come back."""
        own = engine.residents.get(affinity, 0.0) if affinity is not None else 0.0
        later = (engine.weight - own) * self._habits.presence
        return max((later + engine.busy(now)) / 2, later), later

    def _with_room(self, candidates: Sequence[Candidate], costs: list[Cost]) -> list[Cost]:
        """Those where one more rollout may come to live: no engine has many more than its fair part."""
        engines = [self._engines[each.backend_id] for each in candidates]
        weights = [each.share / engine.slowness for each, engine in zip(candidates, engines, strict=True)]
        all_weight = 1 + sum(engine.weight for engine in engines)
        room = [
            cost
            for cost, engine, weight in zip(costs, engines, weights, strict=True)
            if engine.weight < max(_FREELY, _UNFAIR * all_weight * weight / sum(weights))
        ]
        return room or costs

    def _best(self, candidates: Sequence[Candidate], costs: list[Cost], rollout: Rollout | None) -> Cost:
        if len(costs) == 1:
            return costs[0]
        least = min(cost.total for cost in costs)
        bound = least + abs(least) * _EQUAL + _EQUAL_SECONDS
        home = rollout.home if rollout is not None else None
        local = {each.backend_id for each in candidates if each.is_local}

        def rank(cost: Cost) -> tuple[bool, bool, int]:
            rested = self._engines[cost.backend_id].last_chosen
            return cost.backend_id != home, cost.backend_id not in local, rested

        return min((cost for cost in costs if cost.total <= bound), key=rank)

    def _send(self, decision: Decision, chain: list[int], wait: float, now: float) -> None:
        engine = self._engines[decision.backend_id]
        others = engine.busy(now)
        self._decisions += 1
        engine.last_chosen = self._decisions
        engine.begin((decision.prompt_tokens - decision.held_tokens) * engine.prefill_rate, now)
        engine.prefixes.hold(chain)
        self._sent[decision] = _Sent(engine, chain, now, wait, others)
        if decision.affinity is not None:
            self._settle(decision.affinity, decision)
        self._habits.sent(len(self._sent), len(self._rollouts))

    def _settle(self, affinity: str, decision: Decision) -> None:
        home = decision.backend_id
        rollout = self._rollouts.get(affinity)
        if rollout is None:
            rollout = self._rollouts[affinity] = self._habits.begin(home, decision.prompt_tokens)
        rollout.turns += 1
        if rollout.home != home and rollout.home in self._engines:
            self._engines[rollout.home].leave(affinity)
        rollout.home = home
        self._engines[home].settle(affinity, rollout.weight)


def _reason(costs: Sequence[Cost], best: Cost, rollout: Rollout | None) -> Reason:
    if len(costs) == 1:
        return Reason.ONLY
    if rollout is None:
        least = min(cost.held_tokens for cost in costs)
        return Reason.PREFIX if best.held_tokens > least else Reason.LOAD
    if best.backend_id == rollout.home:
        return Reason.HOME
    return Reason.MOVED if any(cost.backend_id == rollout.home for cost in costs) else Reason.HOMELESS
