"""The constants of the cost router, by name, each with the measurement that justifies it.

`benchmarks/routing.py` justifies them as a set: 0.99 of the possible cached tokens at an imbalance of at most 1.03. The
effect of each alone was measured in the simulated time of `tests/unit/inference/routing/test_routing_simulation.py`, as
means over 2 and 4 engines and three seeds. With the defaults, 0.993 of the possible tokens are cached, the imbalance
is 1.020, and 0.03 % of the turns move. If one engine in four takes four times as long as the others, it gets 0.35 of
the tokens that each of them gets.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRouterOptions:
    """How the cost router weighs and learns; the defaults are the measured ones."""

    # ---- choosing

    equal_ratio: float = 0.02
    """Costs that differ by at most this ratio are equal: then the rollout's own engine wins, else one on this node,
    else the one that was chosen longest ago. At 0 the imbalance is 1.037."""
    equal_seconds: float = 1e-4
    """The same as a difference in seconds, for the costs near zero of idle engines. The simulation shows no effect;
    `test_an_engine_on_this_node_is_preferred_at_equal_cost` covers such costs."""
    move_turns: float = 0.25
    """The part of a turn that a move has to save, since expectations err by as much and KV in two places wastes room.
    At 0 thirty times as many turns move (0.9 %), and the imbalance is 1.029."""
    free_rollouts: int = 6
    """Rollouts that may be assigned to an engine whatever the others have, so that a small group can share its
    prompt on one engine. No effect with 16 rollouts an engine, as in the simulation;
    `test_samples_of_a_group_share_a_long_prompt` covers fewer."""
    fair_ratio: float = 1.05
    """Beyond `free_rollouts`, an engine takes new ones up to this multiple of its fair share. At 10 the imbalance is
    1.034; at 1 only 0.991 of the tokens are cached."""
    load_seconds: float = 5.0
    """How long an engine's own report of other clients' requests counts; it is polled every second. There are no
    such clients in the simulation; `test_work_that_others_sent_to_an_engine_counts` covers them."""
    others_rate: float = 0.3
    """The weight of one report in the average of other clients' requests: about the last three seconds count."""
    others_from: float = 0.1
    """An average below this counts as nothing, so that a single node's decisions stay as they are. A report of one
    request is above it."""

    # ---- the capacity of an engine's cache

    default_capacity: int = 1_048_576
    """Tokens that an engine is assumed to hold until it reports or shows otherwise. SGLang reports it; where an engine
    does not, half of its true capacity as the first guess costs 0.2 % of the cached tokens."""
    smallest_capacity: int = 4_096
    """The least that an estimate may shrink to, in tokens: a bound, which no measurement reaches."""
    largest_capacity: int = 16_777_216
    """The most that is assumed, in tokens: it bounds the router's memory."""
    capacity_shrink: float = 0.9
    """When a block is missing that the engine had, its capacity is estimated as this part of what it was believed to
    hold (`test_a_capacity_that_is_not_stated_is_learned`)."""
    capacity_growth: float = 1.02
    """The estimate grows by this factor when an engine held more than was expected (same test)."""
    capacity_full: float = 0.9
    """It grows only while more than this part of it is believed to be in use: with room left, capacity was not the
    reason."""

    # ---- engines that are unlike their pool

    slowness_after: int = 64
    """Answers after which an engine may be found slower or faster than its pool. If none ever were, the slow engine
    of the simulation would be given 0.52 of the others' tokens."""
    slowness_rate: float = 0.01
    """The weight of one answer in that average, so that one delayed by a compilation changes little. At 0.1 the
    slow engine is given 0.36."""
    slowness_from: float = 1.5
    """The factor from which an engine counts as unlike; less is noise of the moment. At 1 nothing in the simulation
    changes by more than 0.002, since its engines have no such noise."""
    slowness_limit: float = 8.0
    """The factor up to which one answer counts, either way. At 2 the slow engine is given 0.41."""
