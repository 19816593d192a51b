"""The sandboxes of programs: from their creation to the end of their time.

Guarantees: a sandbox ends once its time is over, whatever its program does, and with the block of `running`. Its place
is free once it has ended. A key finds only its own sandboxes.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase

import anyio
import structlog
from anyio.abc import TaskGroup

from rollout_service.base.errors import ForbiddenError, NotFoundError, TooManySandboxesError
from rollout_service.base.shutdown import ShuttingDownError
from rollout_service.settings.e2b import E2BApiSettings
from sandboxes import ImageNotFoundError, Sandbox, SandboxProvider, SandboxSpec
from sandboxes.image_names import read_image_name
from sandboxes.scheduling.admission import AdmissionController, Ticket

LOOK_SECONDS = 1.0
"""How often it is seen whether a sandbox has ended by itself."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WantedBox:
    """A sandbox that a program asks for."""

    template: str
    seconds: int
    metadata: Mapping[str, str]
    env: Mapping[str, str]
    internet: bool | None
    """None leaves it to the settings."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Box:
    """A sandbox of a program."""

    sandbox: Sandbox
    owner: str
    """The name of the key that it belongs to."""
    wanted: WantedBox
    number: int
    """Boxes that began later have larger ones."""
    began: datetime
    tasks: TaskGroup
    """Ends with the sandbox."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def renew(self, seconds: float) -> None:
        """Let the sandbox end after this time, counted from now."""
        self.scope.deadline = anyio.current_time() + seconds

    @property
    def seconds_left(self) -> float:
        """How long the sandbox has until its end."""
        return max(self.scope.deadline - anyio.current_time(), 0.0)

    @property
    def ends(self) -> datetime:
        """The end of its time."""
        return datetime.now(UTC) + timedelta(seconds=self.seconds_left)


class Boxes:
    """All sandboxes of programs on this node."""

    def __init__(
        self,
        settings: E2BApiSettings,
        provider: SandboxProvider,
        admission: AdmissionController,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.settings = settings
        self._provider = provider
        self._admission = admission
        self._is_stopping = is_stopping
        self._boxes: dict[str, Box] = {}
        self._numbers = itertools.count(1)
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep sandboxes until the block is left."""
        async with anyio.create_task_group() as self._tasks:
            yield
            self._tasks.cancel_scope.cancel()

    async def create(self, owner: str, wanted: WantedBox) -> Box:
        """Start a sandbox for a key.

        Raises:
            ImageNotFoundError, ForbiddenError: The settings do not allow the image or the network.
            TooManySandboxesError: There is no place.
            ShuttingDownError: The service is shutting down.
            SandboxError: The sandbox does not start.
        """
        spec = self._spec(owner, wanted)
        if self._is_stopping() or self._tasks is None:
            raise ShuttingDownError
        ticket = self._admission.admit_guest(self._most)
        if ticket is None:
            raise TooManySandboxesError(
                "there is no place for another sandbox now",
                hint="Kill sandboxes that are no longer used, try later, or raise `e2b.max_sandboxes`.",
            )
        try:
            sandbox = await self._provider.start(spec)
        except BaseException:
            ticket.release()
            raise
        with anyio.CancelScope(shield=True):  # a task that never begins would leave the sandbox
            box: Box = await self._tasks.start(self._keep, sandbox, owner, wanted, ticket)
        return box

    @property
    def _most(self) -> int:
        return self.settings.max_sandboxes or self._admission.ceiling // 2

    def _spec(self, owner: str, wanted: WantedBox) -> SandboxSpec:
        allowed = self.settings.network
        if wanted.internet and allowed == "none":
            raise ForbiddenError(
                "sandboxes have no internet access here",
                hint="Create them without `allow_internet_access=True`, or set `e2b.network`.",
            )
        image = read_image_name(wanted.template)
        if not any(
            fnmatchcase(name, one) for one in self.settings.images for name in (wanted.template, image)
        ):
            raise ImageNotFoundError(
                f"template {wanted.template!r} is not allowed here", hint="Add it to `e2b.images`."
            )
        network = "none" if wanted.internet is False else allowed
        return SandboxSpec(
            image=image,
            network=tuple(network) if isinstance(network, list) else network,
            env=wanted.env,
            lifetime_seconds=self.settings.max_seconds,  # and so it takes no warm one from rollouts
            label=f"e2b:{owner}",
        )

    async def _keep(
        self,
        sandbox: Sandbox,
        owner: str,
        wanted: WantedBox,
        ticket: Ticket,
        *,
        task_status: anyio.abc.TaskStatus[Box],
    ) -> None:
        """Keep a sandbox for its time, and end it."""
        box: Box | None = None
        try:
            async with anyio.create_task_group() as tasks:
                box = Box(sandbox, owner, wanted, next(self._numbers), datetime.now(UTC), tasks)
                box.renew(wanted.seconds)
                self._boxes[sandbox.id] = box
                with box.scope:
                    task_status.started(box)
                    while sandbox.healthy:  # noqa: ASYNC110 - nothing tells of its end
                        await anyio.sleep(LOOK_SECONDS)
                tasks.cancel_scope.cancel()
        finally:
            self._boxes.pop(sandbox.id, None)
            with anyio.CancelScope(shield=True):
                await sandbox.close()
            ticket.release()
            if box is not None:
                box.ended.set()

    def list(self, owner: str) -> list[Box]:
        """Return the sandboxes of a key, the latest first."""
        found = [box for box in self._boxes.values() if box.owner == owner]
        return sorted(found, key=lambda box: -box.number)

    def find(self, sandbox_id: str) -> Box | None:
        """Return a sandbox of any key; whoever asks must show its token."""
        return self._boxes.get(sandbox_id)

    def get(self, owner: str, sandbox_id: str) -> Box:
        """Return a sandbox of a key.

        Raises:
            NotFoundError: The key has no such sandbox.
        """
        box = self._boxes.get(sandbox_id)
        if box is None or box.owner != owner:
            raise NotFoundError(f"sandbox {sandbox_id[:64]!r} was not found", hint="It may have ended.")
        return box

    async def kill(self, box: Box) -> None:
        """End a sandbox, and wait for its end."""
        box.scope.cancel()
        await box.ended.wait()
