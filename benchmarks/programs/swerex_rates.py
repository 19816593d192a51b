"""Measures SWE-ReX's local runtime as `sandboxes.py` measures ours; runs in .venv-swerex, without this project.

Run: .venv-swerex/bin/python benchmarks/programs/swerex_rates.py CALLS SESSIONS

It prints one JSON object: `run_ms`, the time of each `run_in_session` in milliseconds; `parallel_sleep_s`, how long
`sleep 1` takes when all sessions of one runtime run it at once; and `time_outs`, how many calls hit one of SWE-ReX's
own timeouts, which happens on a busy machine. Calls that time out are repeated, and their times are not counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
import time
from collections.abc import Iterator

from swerex.exceptions import CommandTimeoutError
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime

TIME_OUTS = 10
"""The number of timeouts after which the machine is too busy to measure anything."""


class Rates:
    """One runtime, and the measurements made in it."""

    def __init__(self) -> None:
        self.runtime = LocalRuntime(logger=logging.getLogger("quiet"))
        self.run_ms: list[float] = []
        self.time_outs = 0
        self._numbers: Iterator[int] = itertools.count()

    async def session(self) -> str:
        """Start a session; the start may time out too."""
        while True:
            name = f"session-{next(self._numbers)}"
            try:
                await self.runtime.create_session(
                    CreateBashSessionRequest(session=name, startup_timeout=10.0)
                )
            except CommandTimeoutError:
                self.timed_out()
            else:
                return name

    def timed_out(self) -> None:
        self.time_outs += 1
        if self.time_outs > TIME_OUTS:
            raise SystemExit("the machine is too busy: SWE-ReX ran into its own timeouts again and again")

    async def round_trips(self, calls: int) -> None:
        """Run one command after the other in one session, and in a new one after a timeout."""
        name = await self.session()
        while len(self.run_ms) < calls:
            begun = time.perf_counter()
            try:
                answer = await self.runtime.run_in_session(BashAction(command="echo hello", session=name))
            except CommandTimeoutError:
                self.timed_out()
                name = await self.session()
                continue
            self.run_ms.append((time.perf_counter() - begun) * 1e3)
            if answer.output.strip() != "hello":
                raise SystemExit(f"unexpected output: {answer.output!r}")

    async def sleepers(self, sessions: int) -> float:
        """Return the seconds until `sleep 1` has ended in all of these sessions."""
        while True:
            names = [await self.session() for _ in range(sessions)]
            sleeps = [
                self.runtime.run_in_session(BashAction(command="sleep 1", session=name)) for name in names
            ]
            begun = time.perf_counter()
            found = await asyncio.gather(*sleeps, return_exceptions=True)
            seconds = time.perf_counter() - begun
            if not any(isinstance(one, BaseException) for one in found):
                return seconds
            self.timed_out()


async def main(calls: int, sessions: int) -> None:
    """Measure both, and print them."""
    rates = Rates()
    await rates.round_trips(calls)
    seconds = await rates.sleepers(sessions)
    await rates.runtime.close()
    figures = {"run_ms": rates.run_ms, "parallel_sleep_s": seconds, "time_outs": rates.time_outs}
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
