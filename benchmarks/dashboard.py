"""Measure the page: lists of a large store, a long trajectory in a browser, and what viewers cost the service.

Run: python benchmarks/dashboard.py [--store sqlite|redis] [--rollouts 1000000|10000000] [--json FILE]
[--quick | --smoke]

- `list_ms_p50`: the time of the service to answer with the newest page of a list of 1,000,000 rollouts;
  `list_worst_ms_p50`: the same with the slowest of the filters. With `--store redis`, of a Redis and only these, with
  `list_redis_ms_max`: the longest time that Redis's thread took for one command of the searches, and of retention,
  which then deletes `list_deleted` groups, runs and rollouts; `list_redis_ms_p999` is what one in a thousand of those
  takes that take 0.5 ms: for the longest the thread also had to wait for a processor.
- `first_paint_ms`: from navigation to visible tokens of a trajectory of 100,000 tokens, in headless Chromium.
  `scroll_fps`: frames per second while scrolling through it. `saved_mb`, `saved_paint_ms`: the size of the file with
  its page, and the same time with the file opened from the disk. `longest_task_ms`: what held up the page the longest.
- `page_lcp_slow_ms`: the largest contentful paint of the overview with a processor four times as slow; `page_shift`:
  the score of what moves meanwhile. `page_large_update_ms`: the longest task of an update with 128 engines and 200
  nodes.
- `viewers_cpu_percent`: what ten open pages add to the service's use of one processor, in percentage points.
  `viewers_turn_ms_p50`: what they add to the median time of a turn. `viewers_idle_cpu_percent`: what they add if
  nothing else is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from common import Options, report, run
from support.dashboard import lists, page, pages, viewers

AIMS = {
    "list_ms_p50": "<= 100",
    "list_worst_ms_p50": "<= 100",
    "list_redis_ms_p999": "<= 5",
    "first_paint_ms": "<= 1000",
    "scroll_fps": ">= 50",
    "saved_mb": "<= 5",
    "saved_paint_ms": "<= 1000",
    "longest_task_ms": "<= 200",
    "page_lcp_slow_ms": "<= 1500",
    "page_shift": "<= 0.01",
    "page_large_update_ms": "<= 200",
    "viewers_cpu_percent": "<= 3",
    "viewers_turn_ms_p50": "<= 0.1",
}


@dataclass(frozen=True, slots=True)
class Plan:
    rollouts: int
    """In the lists."""
    page: page.Plan = page.FULL
    updates: int = pages.UPDATES
    viewers: viewers.Plan = viewers.FULL


FULL = Plan(1_000_000)
QUICK = Plan(20_000, viewers=viewers.QUICK)
SMOKE = Plan(2_000, page.SMOKE, updates=1, viewers=viewers.SMOKE)


async def main(given: Options) -> None:
    plan, store = given.plan(FULL, QUICK, SMOKE), given.chosen["store"]
    rollouts = int(given.chosen["rollouts"]) if plan is FULL else plan.rollouts
    figures = await lists.STORES[store](rollouts)
    if store == "sqlite":
        figures |= await page.measure(plan.page)
        figures |= await pages.measure(plan.updates)
        figures |= await viewers.measure(plan.viewers)
    aims = {name: aim for name, aim in AIMS.items() if name in figures}
    report("The page", given, {"rollouts": rollouts, "store": store}, dict(sorted(figures.items())), aims)


if __name__ == "__main__":
    run(
        main,
        "Measure lists, a long trajectory in a browser, and what viewers cost the service.",
        {"store": list(lists.STORES), "rollouts": ["1000000", "10000000"]},
    )
