"""A router that sends each request where it is expected to cost the least time.

The cost of a request on an engine is the sum of

- *wait*: until the engine has read the prompts that were sent to it before;
- *prefill*: of the tokens that the engine is not expected to hold, once for the request itself and once for each
  request that the engine works on, now or on average, since reading a prompt delays all of them;
- *move*: zero on the rollout's own engine; elsewhere a part of a turn, so that rollouts do not move for a small gain;
- *contention*: how much this rollout and the others assigned to the engine are expected to slow each other, in this
  turn or, for a rollout that is not assigned yet, in all its turns. One that waits for a tool counts, since it will
  return.

The first rollout with a prompt decides where its group goes, so the contention of all samples counts, and those to come
are expected there. A further sample only counts what an engine has well beyond its fair share: below that, engines fill
with the next groups wherever it goes. So turns stay where their prefix is, groups stay together unless they are larger
than an engine's share, and a rollout moves once its engine is so busy that reading the prompt again elsewhere is
quicker.

Several nodes may route to the same engines, each for itself; the engines' own reports show the work of the others. As
the samples of a group may run on several nodes, a new rollout is expected to find part of its prompt on the engine that
all nodes try first for it (`rank`): the larger the part of the work that others sent, the likelier one of them was
there.

`engine_model` and `workload` learn the engines' prefix caches and rates and the length of rollouts. A decision takes
time that grows with the logarithm of the prompt's length and the number of candidates; only the tokens that a
conversation gained are hashed.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat

from rollout_service.engines.contract import BackendLoad, GenerateRequest, Generation
from rollout_service.engines.routing.contract import Candidate, Cost, Decision, Reason
from rollout_service.engines.routing.engine_model import (
    BLOCK_TOKENS,
    Chains,
    EngineModel,
    Rates,
    extend_chain,
)
from rollout_service.engines.routing.workload import SampleGroup, TrackedRollout, WorkloadStats

# How the router weighs and learns: these numbers and those of `engine_model`, each with its measurement.
# `benchmarks/routing.py` justifies them as a set: 0.99 of the possible cached tokens at an imbalance of at most 1.03.
# The effect of each alone was measured in the simulated time of
# `tests/unit/inference/routing/test_routing_simulation.py`, as means over 2 and 4 engines and three seeds. With these
# values, 0.993 of the possible tokens are cached, the imbalance is 1.020, and 0.03 % of the turns move. If one engine
# in four takes four times as long as the others, it gets 0.35 of the tokens that each of them gets.
_EQUAL_RATIO = 0.02
"""Costs that differ by at most this ratio are equal: then the rollout's own engine wins, else one on this node,
else the one that was chosen longest ago. At 0 the imbalance is 1.037."""
_EQUAL_SECONDS = 1e-4
"""The same in seconds, for the costs near zero of idle engines. The simulation shows no effect;
`test_an_engine_on_this_node_is_preferred_at_equal_cost` covers such costs."""
_MOVE_TURNS = 0.25
"""The part of a turn that a move has to save, since expectations err by as much and KV in two places wastes room.
At 0 thirty times as many turns move (0.9 %), and the imbalance is 1.029."""
_FREE_ROLLOUTS = 12
"""Rollouts that an engine may have whatever the others have, so that a small group can share its prompt. At 8 one
group in 200 is split by the simulation; `test_a_group_stays_together` covers it."""
_FAIR_GROUPS = 1.5
"""Groups that an engine may have beyond its fair share before a sample leaves its group, because the next groups go
to the others first. At 0.5, 0.992 of the tokens are cached in the traffic of the real engines."""
_LEAST_DUTY_CYCLE = 0.05
"""Bounds how many rollouts of other nodes are inferred from each of their requests in flight."""


@dataclass(slots=True)
class _SentRequest:
    engine: EngineModel
    chain: list[int]
    at: float
    ahead: float
    """Tokens of other prompts that the engine had to read first, at most."""
    sent_tokens: int
    """Tokens that the engine had been sent to read, with these."""
    others: int


class CostRouter:
    """`clock` returns seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, EngineModel] = {}
        self._rollouts: dict[str, TrackedRollout] = {}
        self._groups: dict[int, SampleGroup] = {}
        self._sent: dict[Decision, _SentRequest] = {}
        self._unsettled: tuple[Decision, list[int], int, float, float] | None = None
        """The last decision, not yet known to its engine's model, with chain, prompt, wait and time."""
        self._chains = Chains()
        self._workload = WorkloadStats()
        self._rates = Rates()
        self._decisions = 0

    def choose(self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None) -> Decision:
        self.settle()
        now = self._clock()
        chain = self._chains.of(request.input_ids, affinity)
        prompt = chain[-1] if chain else hash(tuple(request.input_ids))
        if candidates[0].share < 1.0:
            candidates = _relative_shares(candidates)
        rollout = self._rollouts.get(affinity) if affinity is not None else None
        is_new = affinity is not None and rollout is None
        crowds = self._crowds(candidates, prompt) if is_new else repeat(None)
        costs = [
            self._cost(each, crowd, chain, len(request.input_ids), affinity, rollout, now)
            for each, crowd in zip(candidates, crowds, strict=False)
        ]
        considered = self._expecting_others(costs, prompt) if is_new else costs
        best = self._best(candidates, considered, rollout, prompt)
        decision = Decision(
            backend_id=best.backend_id,
            reason=_reason(costs, best, rollout),
            affinity=affinity,
            prompt_tokens=len(request.input_ids),
            held_tokens=best.held_tokens,
            costs=tuple(costs),
        )
        self._unsettled = (decision, chain, prompt, best.wait, now)
        return decision

    def settle(self) -> None:
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            self._send(*unsettled)

    def ended(self, decision: Decision, request: GenerateRequest, answer: Generation | None) -> None:
        self.settle()
        sent = self._sent.pop(decision)
        now = self._clock()
        sent.engine.end(now, sent.sent_tokens if answer is not None else None)
        if answer is None or not answer.output_ids:
            return
        sent.engine.correct(sent.chain, decision.held_tokens, answer.cached_tokens, sent.at)
        uncached = len(request.input_ids) - answer.cached_tokens
        sampled = len(answer.output_ids)
        others = (sent.others + sent.engine.busy(now)) / 2
        sent.engine.learn(uncached, sampled, others, answer.engine_seconds, ahead=sent.ahead)
        rollout = self._rollouts.get(decision.affinity) if decision.affinity is not None else None
        if rollout is not None and rollout.turns > 1:
            self._workload.learn_later_turn(uncached, sampled)
        # The last sampled token has not been read, so its KV is missing.
        known = len(sent.chain) * BLOCK_TOKENS
        rest = [*request.input_ids[known:], *answer.output_ids[:-1]]
        chain = extend_chain(sent.chain, rest, begin=known)
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
        self._workload.end(rollout)
        group = self._groups[rollout.prompt]
        group.end()
        if not group.unfinished:
            self._workload.end_group(self._groups.pop(rollout.prompt))
        if rollout.sticky_backend in self._engines:
            self._engines[rollout.sticky_backend].unassign(affinity)

    def forget(self, backend_id: str) -> None:
        self.settle()
        self._engines.pop(backend_id, None)

    def _engine(self, backend_id: str) -> EngineModel:
        if backend_id not in self._engines:
            self._engines[backend_id] = EngineModel(self._rates)
        return self._engines[backend_id]

    def _cost(
        self,
        candidate: Candidate,
        crowd: float | None,
        chain: Sequence[int],
        tokens: int,
        affinity: str | None,
        rollout: TrackedRollout | None,
        now: float,
    ) -> Cost:
        engine = self._engine(candidate.backend_id)
        # Engines read the last token even of a prompt that they hold whole.
        held = min(engine.prefixes.match(chain) * BLOCK_TOKENS, tokens - 1)
        rates, workload = self._rates, self._workload
        # Seconds that two rollouts' turns take from each other: the tokens read, and the larger batch.
        work = 2.0 * (workload.uncached * rates.prefill + workload.sampled * rates.crowding) * engine.slowness
        others, later = self._others(engine, affinity, now)
        # A rollout that is assigned elsewhere would not stay away for good, so only this turn is weighed.
        met = others if crowd is None else crowd * workload.duty_cycle
        is_move = rollout is not None and rollout.sticky_backend != candidate.backend_id
        turn = rates.expected(workload.uncached, workload.sampled, others)
        return Cost(
            backend_id=candidate.backend_id,
            held_tokens=held,
            wait=engine.wait(now),
            prefill=(1 + max(engine.busy(now), later)) * (tokens - held) * engine.prefill_rate,
            move=_MOVE_TURNS * turn if is_move else 0.0,
            contention=((met + workload.duty_cycle) / candidate.share - workload.duty_cycle) * work,
        )

    def _others(self, engine: EngineModel, affinity: str | None, now: float) -> tuple[float, float]:
        """Return the requests that run at the same time in this turn, and in later ones.

        The present requests end; assigned rollouts come back.
        """
        own = engine.assigned.get(affinity, 0.0) if affinity is not None else 0.0
        assigned = (engine.weight - own) / self._workload.weight
        later = assigned * self._workload.duty_cycle + engine.others_in_flight
        return max((later + engine.busy(now)) / 2, later), later

    def _crowds(self, candidates: Sequence[Candidate], prompt: int) -> list[float]:
        """Return the rollouts that a new one meets on each engine, summed over its turns.

        The first of a group decides for all of them. A later one goes where the prompt is: what others have less up to
        the fair share, the next groups bring. More than that counts in full.
        """
        workload, group = self._workload, self._groups.get(prompt)
        engines = [self._engine(each.backend_id) for each in candidates]
        own_part, duty_cycle = self._own_part(engines), max(_LEAST_DUTY_CYCLE, workload.duty_cycle)
        loads = []
        for each in engines:
            expected = each.expected - (group.expected_now(each) if group is not None else 0.0)
            weight = each.weight + expected * own_part
            loads.append(weight / workload.weight + each.others_in_flight / duty_cycle)
        samples = own_part * max(workload.samples, group.begun if group is not None else 0)
        if group is None:
            return [load * samples * workload.turns for load in loads]
        shares = [each.share / engine.slowness for each, engine in zip(candidates, engines, strict=True)]
        one = (1 + sum(loads)) / sum(shares)
        return [
            max(0.0, load - self._most(one * share, samples)) * workload.turns
            for load, share in zip(loads, shares, strict=True)
        ]

    def _most(self, fair: float, samples: float) -> float:
        """Return the limit of an engine's rollouts; a group of fewer than its fair share is not split."""
        slack = _FAIR_GROUPS * samples if samples <= fair else 0.0
        return max(_FREE_ROLLOUTS, fair + slack)

    def _expecting_others(self, costs: list[Cost], prompt: int) -> list[Cost]:
        """Make the prompt cheaper on the engine where other nodes may have sent it already."""
        unread = self._own_part([self._engines[cost.backend_id] for cost in costs])
        if unread == 1.0 or len(costs) == 1:
            return costs
        chosen = first_choice(prompt, (cost.backend_id for cost in costs))
        return [cost._replace(prefill=cost.prefill * unread) if cost.backend_id == chosen else cost for cost in costs]

    @staticmethod
    def _own_part(engines: Sequence[EngineModel]) -> float:
        own = 1 + sum(engine.in_flight for engine in engines)
        return own / (own + sum(engine.others_in_flight for engine in engines))

    def _best(
        self, candidates: Sequence[Candidate], costs: list[Cost], rollout: TrackedRollout | None, prompt: int
    ) -> Cost:
        if len(costs) == 1:
            return costs[0]
        least = min(cost.total for cost in costs)
        bound = least + abs(least) * _EQUAL_RATIO + _EQUAL_SECONDS
        sticky = rollout.sticky_backend if rollout is not None else None
        local = {each.backend_id for each in candidates if each.is_local}

        is_shared = any(self._engines[cost.backend_id].others_in_flight for cost in costs)

        def order(cost: Cost) -> tuple[bool, bool, int, bytes]:
            last_chosen = 0 if is_shared else self._engines[cost.backend_id].last_chosen
            ranked = rank(prompt, cost.backend_id)
            return cost.backend_id != sticky, cost.backend_id not in local, last_chosen, ranked

        return min((cost for cost in costs if cost.total <= bound), key=order)

    def _send(self, decision: Decision, chain: list[int], prompt: int, wait: float, now: float) -> None:
        engine = self._engines[decision.backend_id]
        others = engine.busy(now)
        self._decisions += 1
        engine.last_chosen = self._decisions
        engine.begin(decision.prompt_tokens - decision.held_tokens, now)
        engine.prefixes.hold(chain)
        ahead = wait / engine.prefill_rate if wait else 0.0
        self._sent[decision] = _SentRequest(engine, chain, now, ahead, engine.sent_tokens, others)
        if decision.affinity is not None:
            self._assign(decision.affinity, decision, prompt)
        self._workload.learn_duty_cycle(len(self._sent), len(self._rollouts))

    def _assign(self, affinity: str, decision: Decision, prompt: int) -> None:
        backend_id = decision.backend_id
        rollout = self._rollouts.get(affinity)
        if rollout is None:
            rollout = self._workload.begin(backend_id, prompt, decision.prompt_tokens)
            self._rollouts[affinity] = rollout
            engine = self._engines[backend_id]
            group = self._groups.setdefault(prompt, SampleGroup(engine))
            group.begin(engine, rollout.weight, self._workload.samples)
        rollout.turns += 1
        if rollout.sticky_backend != backend_id and rollout.sticky_backend in self._engines:
            self._engines[rollout.sticky_backend].unassign(affinity)
        rollout.sticky_backend = backend_id
        self._engines[backend_id].assign(affinity, rollout.weight)


def _relative_shares(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Scale the largest share to 1: where all have joined of late, none is new."""
    most = max(each.share for each in candidates)
    return [each._replace(share=each.share / most) for each in candidates]


def _reason(costs: Sequence[Cost], best: Cost, rollout: TrackedRollout | None) -> Reason:
    if len(costs) == 1:
        return Reason.ONLY
    if rollout is None:
        least = min(cost.held_tokens for cost in costs)
        return Reason.PREFIX if best.held_tokens > least else Reason.LOAD
    if best.backend_id == rollout.sticky_backend:
        return Reason.HOME
    is_present = any(cost.backend_id == rollout.sticky_backend for cost in costs)
    return Reason.MOVED if is_present else Reason.HOMELESS


def rank(prompt: int, backend_id: str) -> bytes:
    """Return the rank of an engine for a prompt with this hash; the least comes first.

    It depends only on the prompt and the engine's id, so all nodes agree without talking to each other. When an engine
    joins or leaves, only the prompts whose first choice it is change theirs.
    """
    return blake2b(f"{prompt}:{backend_id}".encode(), digest_size=8).digest()


def first_choice(prompt: int, backend_ids: Iterable[str]) -> str:
    return min(backend_ids, key=lambda backend_id: rank(prompt, backend_id))
