"""A scripted engine with a simulated prefix cache that counts its tokens as SGLang does, for `routing.py`.

Run: python benchmarks/programs/kv_engine.py --address FILE --kv-tokens N --time-scale X
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web

from rollout_service.testing import Counting, Hardware, Reply, ScriptedEngine
from rollout_service.testing.serving import serve


class Counted:
    """The script `Counting`, which also counts the tokens of its prompts and answers."""

    def __init__(self, vocab_size: int) -> None:
        self._script = Counting(vocab_size)
        self.totals = {"prompt": 0, "generation": 0}

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        self.totals["prompt"] += len(input_ids)
        self.totals["generation"] += budget
        return self._script.reply(input_ids, budget)


class MeteredEngine(ScriptedEngine):
    """An engine that reports its totals at `/metrics`."""

    def __init__(self, hardware: Hardware, vocab_size: int) -> None:
        self._script_totals = Counted(vocab_size)
        super().__init__(self._script_totals, hardware=hardware, vocab_size=vocab_size)
        self._routes["/metrics"] = self._metrics

    async def _metrics(self, _: dict[str, Any]) -> web.Response:
        totals = self._script_totals.totals
        return web.Response(text="".join(f"sglang:{kind}_tokens_total {count}\n" for kind, count in totals.items()))


async def main() -> None:
    parser = argparse.ArgumentParser(description="Run a scripted engine with a simulated prefix cache.")
    parser.add_argument("--address", type=Path, required=True, help="write the URL to this file")
    parser.add_argument("--kv-tokens", type=int, required=True, help="room of the cache")
    parser.add_argument("--time-scale", type=float, default=1.0, help="multiplies all times")
    parser.add_argument("--vocab-size", type=int, default=512)
    given = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # routers also try gRPC
    usual = Hardware()
    hardware = Hardware(
        kv_tokens=given.kv_tokens,
        prefill_seconds=usual.prefill_seconds * given.time_scale,
        decode_seconds=usual.decode_seconds * given.time_scale,
    )
    await serve(MeteredEngine(hardware, given.vocab_size), address=given.address)


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
