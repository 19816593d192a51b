"""Count the attacks that the service and its sandboxes withstood, and measure the effect on neighbors.

Run: python benchmarks/security.py [--json FILE] [--quick | --smoke]

An area is a suite of attacks, each of which raises if it succeeded; `AREAS` lists the areas. An attack that has nothing
to attack here counts neither as held nor as broken. A resource attack takes as much as it can get of one thing, again
and again, in one sandbox. Its figure is the round trip of `true` in a neighbor's shell during the attack over that
before it, measured as in `neighbors.py`; `taken` is how many one process got. With `--quick`, each area tries as many
attacks as a few seconds allow, and the resource attacks have two short rounds; with `--smoke`, all have one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
from common import HERE, Figures, Options, report, run

sys.path.insert(0, str(HERE.parent))  # the attacks are the tests' own
from neighbors import LIMITS, ROUNDS, SHELL, in_shell, probes, ratios

from rollout_service.authoring.attacks import SCRIPTS, Attack, AttackVerdict, attack_environment
from rollout_service.cli.env.check import load_environment
from rollout_service.pipeline.sandbox_source import SandboxSource
from sandboxes import ApptainerConfig, Sandbox, SandboxProvider, SandboxSpec, make_provider
from tests.support.api import attacks as api
from tests.support.api.server import api_server
from tests.support.hostile import CHECKS, NOTHING, NothingToAttackError, kernel
from tests.support.hostile.downloads import DOWNLOADS
from tests.support.users.as_user import OrdinaryUser, ordinary_user

RATIO_AIM = 1.5
CHECK_SECONDS = 170.0
BROKEN = (AttackVerdict.FORGED, AttackVerdict.NULLED)


@dataclass(frozen=True, slots=True)
class Plan:
    sandbox: Sequence[str]
    api: Sequence[str]
    downloads: Sequence[str]
    hacks: Sequence[Attack]
    environments: Sequence[str]
    """Those whose rewards agents try to forge or void."""


FULL = Plan([*CHECKS], [*api.CHECKS], [*DOWNLOADS], SCRIPTS, ("calc", "code"))
QUICK = Plan(
    ("process_1", "other_socket_families", "users_of_the_host", "stop_everything"),
    [*api.CHECKS][:9],
    [*DOWNLOADS],
    SCRIPTS[:3],
    ("calc",),
)
SMOKE = Plan(QUICK.sandbox[:1], QUICK.api[:1], QUICK.downloads[:1], QUICK.hacks[:1], QUICK.environments)


class Outcome(NamedTuple):
    """The outcome of one attack."""

    attack: str
    failure: str
    """Why it counts as broken; "" where everything held."""
    applies: bool = True
    """Whether there was anything to attack; it could not have failed otherwise."""


Area = Callable[[Plan], AsyncIterator[Outcome]]
"""A function that tries its attacks one after the other."""


async def sandbox_attacks(plan: Plan) -> AsyncIterator[Outcome]:
    """Attack a sandbox from inside, its neighbors and the host, as the user who runs this."""
    for name in plan.sandbox:
        with tempfile.TemporaryDirectory() as state:
            provider = make_provider(ApptainerConfig(), Path(state))
            failure, applies = "", True
            try:
                with anyio.fail_after(CHECK_SECONDS):
                    await CHECKS[name](provider)
            except NothingToAttackError:
                applies = False
            except Exception:  # noqa: BLE001  any exception means that the sandbox did not hold
                failure = traceback.format_exc()
            finally:
                await provider.close()
        yield Outcome(name, failure, applies)


async def sandbox_attacks_as_a_user(plan: Plan) -> AsyncIterator[Outcome]:
    """Run the same attacks with an ordinary user's service; yield none if the caller is not root."""
    if os.geteuid() != 0:
        return
    with ordinary_user() as user:
        for name in plan.sandbox:
            yield await anyio.to_thread.run_sync(attack_as, user, name)


def attack_as(user: OrdinaryUser, name: str) -> Outcome:
    done = user.run(["python", "-m", "tests.support.hostile", name], timeout=CHECK_SECONDS)
    left = user.processes()
    if done.returncode != 0:
        return Outcome(name, f"exit code {done.returncode}: {done.stdout}")
    return Outcome(name, f"processes are left: {left}" if left else "", applies=NOTHING not in done.stdout)


async def api_attacks(plan: Plan) -> AsyncIterator[Outcome]:
    """Attack a server with few descriptors: without a key, with too small a role, and from web pages."""
    keys = {role: f"{role}-key-of-enough-characters" for role in ("admin", "read", "submit")}
    tables = json.dumps([{"name": role, "role": role, "key": key} for role, key in keys.items()])
    with (
        tempfile.TemporaryDirectory() as folder,
        api_server(Path(folder), before=["prlimit", "--nofile=900:900"], ROLLOUT_KEYS=tables) as server,
    ):
        async for outcome in api.attack(api.Target(server.url, **keys), plan.api):
            yield Outcome(outcome.name, outcome.why)


async def hostile_downloads(plan: Plan) -> AsyncIterator[Outcome]:
    """Load tasks and Dockerfiles that name paths of the host."""
    for name in plan.downloads:
        failure = ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                await anyio.to_thread.run_sync(DOWNLOADS[name], Path(folder))
            except Exception:  # noqa: BLE001  any exception means that a path was taken
                failure = traceback.format_exc()
        yield Outcome(name, failure)


async def reward_hacks(plan: Plan) -> AsyncIterator[Outcome]:
    """Run agents that forge or void their reward in the packaged environments."""
    for environment in plan.environments:
        with tempfile.TemporaryDirectory() as state:
            provider = make_provider(ApptainerConfig(), Path(state))
            try:
                attacked = load_environment(environment)
                found = await attack_environment(attacked, SandboxSource(provider), attacks=plan.hacks)
            finally:
                await provider.close()
        for hack in found.outcomes:
            failure = f"{hack.verdict}: {hack.detail}" if hack.verdict in BROKEN else ""
            yield Outcome(f"{environment}: {hack.attack}", failure)


AREAS: dict[str, Area] = {
    "sandboxes": sandbox_attacks,
    "sandboxes_as_a_user": sandbox_attacks_as_a_user,
    "api": api_attacks,
    "downloads": hostile_downloads,
    "rewards": reward_hacks,
}
"""The suites of attacks, each an asynchronous generator of outcomes."""

AGAIN = """
import ctypes, os
out = os.open(f"/tmp/taken-{os.getpid()}", os.O_WRONLY | os.O_CREAT)

def again(take, free):
    "Take as many as there are, let go of all of them, and so on; write down how many it was at most."
    most, held = 0, []
    while True:
        try:
            while True:
                take(held)
                if len(held) > most and len(held) % 32 == 1:
                    most = note(len(held))
        except OSError:
            most = note(max(most, len(held)))
        while held:
            free(held.pop())

def note(count):
    os.pwrite(out, b"%d" % count, 0)
    return count
"""
EPOLL = """
import select
pipe, _ = os.pipe()
targets = [os.dup(pipe) for _ in range(1500)]

def take(held):
    if len(held) == 300:  # four processes have 1.8 million watches; the memory of more ends the sandbox
        raise OSError("enough")
    held.append(select.epoll())
    for target in targets:
        held[-1].register(target, select.EPOLLIN)

again(take, lambda one: one.close())
"""
INOTIFY = """
libc = ctypes.CDLL(None)
folders = [folder.encode() for folder, _, _ in os.walk("/usr/share")]

def take(held):
    made = libc.inotify_init()
    if made < 0:
        raise OSError("none is left")
    held.append(made)
    for folder in folders:
        libc.inotify_add_watch(made, folder, 0xFFF)

again(take, os.close)
"""
PTYS = """
def take(held):
    held.append(os.openpty())

def free(pair):
    os.close(pair[0])
    os.close(pair[1])

again(take, free)
"""
DESCRIPTORS = """
import array, socket
packet = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 250)
pairs = []

def send():
    pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packet)])

def take(held):
    try:
        send()
    except (IndexError, BlockingIOError):
        pairs.append(socket.socketpair())
        pairs[-1][0].setblocking(False)
        send()
    held.append(None)

def free(_):
    while pairs:
        for end in pairs.pop():
            end.close()

again(take, free)
"""
KEYS = f"""
libc, number = ctypes.CDLL(None), 0

def take(held):
    global number
    number += 1
    if libc.syscall({kernel.CALLS["add_key"]}, b"user", b"%d" % number, b"x" * 100, 100, -3) < 0:
        raise OSError("refused")
    held.append(number)

again(take, lambda one: None)
"""
PROGRAMS = {"epoll": EPOLL, "inotify": INOTIFY, "ptys": PTYS, "descriptors": DESCRIPTORS, "keys": KEYS}
REFUSED = {"keys"}
"""Resources that a sandbox gets none of: the attack asks for them again and again."""
COMMANDS = {"disk": "full_disk", "memory": "memory_hog", "processes": "fork_bomb", "cpu": "spin"}
TAKE_SECONDS = 3


def resource_attacks() -> dict[str, Callable[[Sandbox], Awaitable[object]]]:
    """Return the attacks by the resource that they use up."""

    def of_program(code: str) -> Callable[[Sandbox], Awaitable[object]]:
        async def attack(sandbox: Sandbox) -> object:
            await sandbox.write_file("/tmp/attack.py", AGAIN + code)
            return await in_shell("for i in 1 2 3 4; do python3 /tmp/attack.py & done; wait")(sandbox)

        return attack

    return {name: of_program(code) for name, code in PROGRAMS.items()} | {
        name: in_shell(SHELL[command]) for name, command in COMMANDS.items()
    }


async def taken(provider: SandboxProvider, name: str) -> int:
    """Return how many of a resource one process of the attack takes at most.

    Raises:
        RuntimeError: The process takes nothing but should; the effect on neighbors would then mean nothing.
    """
    async with await provider.start(SandboxSpec(**LIMITS)) as sandbox:  # type: ignore[arg-type]
        await sandbox.write_file("/tmp/attack.py", AGAIN + PROGRAMS[name])
        done = await sandbox.exec(["timeout", str(TAKE_SECONDS), "python3", "/tmp/attack.py"])
        found = await sandbox.exec(["sh", "-c", "cat /tmp/taken-*"])
    most = int(found.stdout or 0)
    if (most == 0) != (name in REFUSED):
        raise RuntimeError(f"the attack {name} took {most}: {done.stderr.decode(errors='replace')}")
    return most


async def try_areas(plan: Plan) -> Figures:
    """Count the attacks that held; describe the others on standard error."""
    figures: Figures = {}
    for area, attacks in AREAS.items():
        tried = [outcome async for outcome in attacks(plan)]
        outcomes = [outcome for outcome in tried if outcome.applies]
        broken = [outcome for outcome in outcomes if outcome.failure]
        for outcome in broken:
            sys.stderr.write(f"{area}: {outcome.attack}: {outcome.failure}\n")
        figures[f"{area}_attacks"] = len(outcomes)
        figures[f"{area}_held"] = len(outcomes) - len(broken)
        figures[f"{area}_broken"] = len(broken)
        figures[f"{area}_without_target"] = len(tried) - len(outcomes)
    figures["attacks"] = sum(figures[f"{area}_attacks"] or 0 for area in AREAS)
    figures["broken"] = sum(figures[f"{area}_broken"] or 0 for area in AREAS)
    return figures


async def measure(rounds: int, seconds: float) -> dict[str, float]:
    """Measure the effect of each resource attack on a neighbor."""
    found: dict[str, float] = {}
    counts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as state:
        provider = make_provider(ApptainerConfig(), Path(state))
        try:
            for name in PROGRAMS:
                counts[f"{name}_taken"] = await taken(provider, name)
            async with probes(provider) as neighbor:
                for name, attack in resource_attacks().items():
                    figures = await ratios(provider, neighbor, name, attack, rounds, seconds)
                    found[f"neighbor_{name}_p50_ratio"] = figures[f"{name}_neighbor_p50_ratio"]
        finally:
            await provider.close()
    return counts | found | {"neighbor_p50_ratio_max": max(found.values())}


async def main(given: Options) -> None:
    """Try every area, then measure every resource attack."""
    plan = given.plan(FULL, QUICK, SMOKE)
    rounds, seconds = given.plan(*ROUNDS)
    figures = await try_areas(plan) | await measure(rounds, seconds)
    aims = {key: "0" for key in figures if key.endswith("broken")}
    aims |= {key: f"<= {RATIO_AIM}" for key in figures if key.startswith("neighbor_")}
    report("security", given, {"rounds": rounds, "seconds": seconds}, figures, aims)


if __name__ == "__main__":
    run(main, __doc__ or "")
