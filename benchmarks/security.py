"""Attacks on the service and its sandboxes: how many were tried, how many held, and what neighbours noticed.

    python benchmarks/security.py [--json FILE] [--quick]

An area is a suite of attacks, each of which raises where it succeeded; `AREAS` lists them. A resource attack takes
all that it can get of one thing, again and again, in one sandbox: its figure is the round trip of `true` in a
neighbour's shell meanwhile against before, as `neighbours.py` measures it. With --quick the attacks of an area
are as many as a few seconds allow, and the resource attacks have two short rounds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
from common import HERE, Options, report, run

sys.path.insert(0, str(HERE.parent))  # the attacks are the tests' own
from neighbours import ATTACK_SECONDS, SHELL, probes, ratios

from rollout_service.attacks import SCRIPTS, Verdict, attack_environment
from rollout_service.cli.env_check import load_environment
from rollout_service.pipeline.sandboxing import SandboxSource
from sandboxes import ApptainerConfig, Sandbox, make_provider
from tests.support import api_attacks as api
from tests.support import hostile_kernel
from tests.support.api_server import api_server
from tests.support.as_user import OrdinaryUser, ordinary_user
from tests.support.hostile import CHECKS

RATIO_AIM = 1.5
QUICK_API = 9
CHECK_SECONDS = 170.0
QUICK = ("process_1", "other_socket_families", "users_of_the_host", "kill_everything")

QUICK_HACKS = 3
ENVIRONMENTS = ("calc", "code")
BROKEN = (Verdict.FORGED, Verdict.NULLED)


class Outcome(NamedTuple):
    """What one attack came to."""

    attack: str
    failure: str
    """Why it counts as broken; "" where everything held."""


Area = Callable[[bool], AsyncIterator[Outcome]]
"""Given whether to be quick, tries its attacks one after the other."""


async def sandbox_attacks(quick: bool) -> AsyncIterator[Outcome]:
    """Code that attacks its sandbox, its neighbours and the host, as whoever runs this."""
    for name in names(quick):
        with tempfile.TemporaryDirectory() as state:
            provider = make_provider(ApptainerConfig(), Path(state))
            try:
                with anyio.fail_after(CHECK_SECONDS):
                    await CHECKS[name](provider)
                failure = ""
            except Exception:  # noqa: BLE001  whatever it is, the sandbox did not hold
                failure = traceback.format_exc()
            finally:
                await provider.close()
        yield Outcome(name, failure)


async def sandbox_attacks_as_a_user(quick: bool) -> AsyncIterator[Outcome]:
    """Run the same attacks with an ordinary user's service; none for a caller who is one already."""
    if os.geteuid() != 0:
        return
    with ordinary_user() as user:
        for name in names(quick):
            yield Outcome(name, await anyio.to_thread.run_sync(attack_as, user, name))


def attack_as(user: OrdinaryUser, name: str) -> str:
    """Run one check as an ordinary user; what it said where it failed."""
    done = user.run(["python", "-m", "tests.support.hostile", name], timeout=CHECK_SECONDS)
    if done.returncode != 0:
        return done.stdout
    left = user.processes()
    return f"processes are left: {left}" if left else ""


def names(quick: bool) -> Iterable[str]:
    """Return the checks to run; one module is imported for its checks alone."""
    assert hostile_kernel.check
    return QUICK if quick else CHECKS


async def api_attacks(quick: bool) -> AsyncIterator[Outcome]:
    """Attack a server with few descriptors: without a key, with too small a role, and from web pages."""
    keys = {role: f"{role}-key-of-enough-characters" for role in ("admin", "read", "submit")}
    tables = json.dumps([{"name": role, "role": role, "key": key} for role, key in keys.items()])
    names = [*api.CHECKS][:QUICK_API] if quick else [*api.CHECKS]
    with (
        tempfile.TemporaryDirectory() as folder,
        api_server(Path(folder), before=["prlimit", "--nofile=900:900"], ROLLOUT_KEYS=tables) as server,
    ):
        async for outcome in api.attack(api.Target(server.url, **keys), names):
            yield Outcome(outcome.name, outcome.why)


async def reward_hacks(quick: bool) -> AsyncIterator[Outcome]:
    """Run agents that forge or void their reward in the packaged environments."""
    for environment in ENVIRONMENTS[:1] if quick else ENVIRONMENTS:
        with tempfile.TemporaryDirectory() as state:
            provider = make_provider(ApptainerConfig(), Path(state))
            try:
                chosen = SCRIPTS[:QUICK_HACKS] if quick else SCRIPTS
                attacked = load_environment(environment)
                found = await attack_environment(attacked, SandboxSource(provider), attacks=chosen)
            finally:
                await provider.close()
        for hack in found.outcomes:
            failure = f"{hack.verdict}: {hack.detail}" if hack.verdict in BROKEN else ""
            yield Outcome(f"{environment}: {hack.attack}", failure)


AREAS: dict[str, Area] = {
    "sandboxes": sandbox_attacks,
    "sandboxes_as_a_user": sandbox_attacks_as_a_user,
    "api": api_attacks,
    "rewards": reward_hacks,
}
"""Another suite is another entry here: an asynchronous generator of outcomes."""

EPOLL = """
import os, select
while True:
    targets = [os.dup(os.pipe()[0]) for _ in range(1500)]
    held = []
    try:
        while True:
            held.append(select.epoll())
            for target in targets:
                held[-1].register(target, select.EPOLLIN)
    except OSError:
        for fd in range(3, os.sysconf("SC_OPEN_MAX")):
            try:
                os.close(fd)
            except OSError:
                pass
"""
INOTIFY = """
import ctypes, os
libc = ctypes.CDLL(None)
while True:
    held = []
    while (made := libc.inotify_init()) >= 0:
        held.append(made)
        for folder, _, _ in os.walk("/usr/share"):
            libc.inotify_add_watch(made, folder.encode(), 0xFFF)
    for made in held:
        os.close(made)
"""
PTYS = """
import os
while True:
    held = []
    try:
        while True:
            held += os.openpty()
    except OSError:
        for fd in held:
            os.close(fd)
"""
DESCRIPTORS = """
import array, os, socket
packet = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 250)
while True:
    held = []
    try:
        while True:
            held.append(socket.socketpair())
            held[-1][0].setblocking(False)
            try:
                while True:
                    held[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packet)])
            except BlockingIOError:
                pass
    except OSError:
        for pair in held:
            pair[0].close()
            pair[1].close()
"""
KEYS = f"""
import ctypes
libc, number = ctypes.CDLL(None), 0
while True:
    number += 1
    libc.syscall({hostile_kernel.CALLS["add_key"]}, b"user", b"%d" % number, b"x" * 100, 100, -3)
"""
PROGRAMS = {"epoll": EPOLL, "inotify": INOTIFY, "ptys": PTYS, "descriptors": DESCRIPTORS, "keys": KEYS}
COMMANDS = {"disk": "full_disk", "memory": "memory_hog", "processes": "fork_bomb", "cpu": "spin"}


def resource_attacks() -> dict[str, Callable[[Sandbox], Awaitable[object]]]:
    """By what they use up."""

    def of_program(code: str) -> Callable[[Sandbox], Awaitable[object]]:
        async def attack(sandbox: Sandbox) -> object:
            await sandbox.write_file("/tmp/attack.py", code)
            again = "for i in 1 2 3 4; do python3 /tmp/attack.py & done; wait"
            return await (await sandbox.bash()).run(again, timeout=ATTACK_SECONDS)

        return attack

    def of_command(command: str) -> Callable[[Sandbox], Awaitable[object]]:
        async def attack(sandbox: Sandbox) -> object:
            return await (await sandbox.bash()).run(command, timeout=ATTACK_SECONDS)

        return attack

    return {name: of_program(code) for name, code in PROGRAMS.items()} | {
        name: of_command(SHELL[command]) for name, command in COMMANDS.items()
    }


async def try_areas(quick: bool) -> dict[str, float | int | None]:
    """Count what held; what did not is said on standard error."""
    figures: dict[str, float | int | None] = {}
    for area, attacks in AREAS.items():
        outcomes = [outcome async for outcome in attacks(quick)]
        broken = [outcome for outcome in outcomes if outcome.failure]
        for outcome in broken:
            sys.stderr.write(f"{area}: {outcome.attack}: {outcome.failure}\n")
        figures[f"{area}_attacks"] = len(outcomes)
        figures[f"{area}_held"] = len(outcomes) - len(broken)
        figures[f"{area}_broken"] = len(broken)
    figures["attacks"] = sum(figures[f"{area}_attacks"] or 0 for area in AREAS)
    figures["broken"] = sum(figures[f"{area}_broken"] or 0 for area in AREAS)
    return figures


async def measure(rounds: int, seconds: float) -> dict[str, float]:
    """Measure what a neighbour notices of each resource attack."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as state:
        provider = make_provider(ApptainerConfig(), Path(state))
        try:
            async with probes(provider) as neighbour:
                for name, attack in resource_attacks().items():
                    figures = await ratios(provider, neighbour, name, attack, rounds, seconds)
                    found[f"neighbour_{name}_p50_ratio"] = figures[f"{name}_neighbour_p50_ratio"]
        finally:
            await provider.close()
    return found | {"neighbour_p50_ratio_max": max(found.values())}


async def main(given: Options) -> None:
    """Try every area, then measure every resource attack."""
    rounds, seconds = (2, 0.4) if given.quick else (9, 1.5)
    figures = await try_areas(given.quick) | await measure(rounds, seconds)
    aims = {key: "0" for key in figures if key.endswith("broken")}
    aims |= {key: f"<= {RATIO_AIM}" for key in figures if key.startswith("neighbour_")}
    report("security", given, {"rounds": rounds, "seconds": seconds}, figures, aims)


if __name__ == "__main__":
    run(main, __doc__ or "")
