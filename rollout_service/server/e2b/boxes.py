"""The sandboxes of programs: from their creation to the end of their time.

A sandbox ends once its time is over, whatever its program does, and with the block of `running`. Its place is free once
it has ended. A key finds only its own sandboxes.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import anyio
from anyio.abc import TaskGroup
from pydantic import BaseModel, ConfigDict, Field

from rollout_service.base.errors import (
    ForbiddenError,
    NotFoundError,
    ServiceError,
    TooManySandboxesError,
    UnavailableError,
)
from rollout_service.base.shutdown import ShuttingDownError
from rollout_service.settings.http import E2BApiSettings
from sandboxes import ImageNotFoundError, Sandbox, SandboxError, SandboxProvider, SandboxSpec
from sandboxes.errors import SandboxConfigError
from sandboxes.image_names import read_image_name
from sandboxes.scheduling.admission import AdmissionController, Ticket

LOOK_SECONDS = 1.0
DEFAULT_SECONDS = 300
NO_NUL = r"^[^\x00]*$"
Text = Annotated[str, Field(max_length=4_096, pattern=NO_NUL)]
Table = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=256, pattern=NO_NUL)], Text], Field(max_length=128)
]


class RequestBody(BaseModel):
    model_config = ConfigDict(strict=True)


class NewBox(RequestBody):
    template: str = Field(alias="templateID", min_length=1, max_length=512)
    timeout: int = Field(DEFAULT_SECONDS, ge=1)
    metadata: Table = {}
    env: Table = Field({}, alias="envVars")
    internet: bool | None = Field(None, alias="allow_internet_access")


@dataclass(eq=False, slots=True)
class Box:
    sandbox: Sandbox
    owner: str
    new: NewBox
    number: int
    """Later boxes have larger ones."""
    tasks: TaskGroup
    """Runs its commands; each ends with the sandbox."""
    commands: list[Any] = field(default_factory=list)
    contexts: dict[str, Any] = field(default_factory=dict)
    watchers: dict[str, Any] = field(default_factory=dict)
    creating_context: anyio.Lock = field(default_factory=anyio.Lock)
    saving: anyio.Lock = field(default_factory=anyio.Lock)
    """Held while its files are read for forks."""
    paused: bool = False
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def state(self) -> str:
        return "paused" if self.paused else "running"

    @property
    def most_seconds(self) -> float:
        """The longest that it may live, however often it is renewed."""
        return self.sandbox.spec.lifetime_seconds or math.inf

    @property
    def seconds_left(self) -> float:
        return self.scope.deadline - anyio.current_time()

    def renew(self, seconds: float) -> None:
        """End the sandbox this many seconds from now."""
        self.scope.deadline = anyio.current_time() + seconds

    async def pause(self) -> None:
        """Stop everything inside until `resume`; its time stands still, its `lifetime_seconds` do not.

        Raises:
            UnavailableError: A command or a transfer of files is under way.
            SandboxError: It cannot be paused.
        """
        if not await self.sandbox.pause():
            raise UnavailableError("the sandbox is at work", hint="Pause it once its commands have ended.")
        self.paused = True
        self.renew(self.most_seconds)

    async def resume(self) -> None:
        if self.paused:
            await self.sandbox.exec(["true"])
            self.paused = False

    async def kill(self) -> None:
        self.scope.cancel()
        await self.ended.wait()


CURRENT_BOX: ContextVar[Box] = ContextVar("current_box")
"""The sandbox of the current request, once its token has been checked."""


class Boxes:
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
        self._forking = anyio.Lock()
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as self._tasks:
            yield
            self._tasks.cancel_scope.cancel()

    async def create(self, owner: str, new: NewBox, saved: Path | None = None) -> Box:
        """Start a sandbox for a key, from the `saved` files of another if given.

        Raises:
            ImageNotFoundError, ImagePathError, ForbiddenError: The settings do not allow the image or the network.
            TooManySandboxesError: There is no place.
            ShuttingDownError: The service is shutting down.
            SandboxError: The sandbox does not start.
        """
        spec = replace(self._spec(owner, new), saved=saved)
        if self._tasks is None or self._is_stopping():
            raise ShuttingDownError
        ticket = self._admission.admit_guest(self.settings.max_sandboxes or self._admission.ceiling // 2)
        if ticket is None:
            raise self._no_place()
        try:
            sandbox = await self._provider.start(spec)
        except BaseException:
            ticket.release()
            raise
        box = self._boxes[sandbox.id] = Box(sandbox, owner, new, next(self._numbers), self._tasks)
        box.renew(new.timeout)
        self._tasks.start_soon(self._keep, box, ticket)
        return box

    def _no_place(self) -> TooManySandboxesError:
        if reasons := self._admission.pressure_reasons:
            return TooManySandboxesError(
                f"the host is under pressure: {', '.join(hold.text for hold in reasons)}",
                hint="Try later, or end other programs on the host.",
            )
        return TooManySandboxesError(
            "there is no place for another sandbox now",
            hint="Kill sandboxes that are no longer used, try later when rollouts have ended, or raise "
            "`e2b.max_sandboxes`.",
        )

    async def fork(self, box: Box, seconds: int, count: int) -> list[Box | Exception]:
        """Start sandboxes with the files of one, which keeps running; return each, or the error that prevented it.

        Raises:
            SandboxError: Its files cannot be saved, such as while a program runs.
        """
        if not await self._provider.saves(box.sandbox.spec):
            raise SandboxConfigError("this host cannot save sandboxes, from which forks start")
        new = box.new.model_copy(update={"timeout": seconds})
        found: list[Box | Exception] = []

        async def start(saved: Path) -> None:
            try:
                found.append(await self.create(box.owner, new, saved))
            except (ServiceError, SandboxError) as error:
                found.append(error)

        async with self._forking:  # one at a time, which bounds the disk space they take
            with TemporaryDirectory(prefix="rollout-fork-") as folder:
                saved = Path(folder) / "saved"
                async with (
                    box.saving,
                    await anyio.open_file(saved, "wb") as file,
                    aclosing(box.sandbox.save(limit=self.settings.max_file_bytes)) as parts,
                ):
                    async for part in parts:
                        await file.write(part)
                try:
                    async with anyio.create_task_group() as tasks:
                        for _ in range(count):
                            tasks.start_soon(start, saved)
                except BaseException:  # nobody learns of those that have started
                    for fork in found:
                        if isinstance(fork, Box):
                            fork.scope.cancel()
                    raise
        return found

    def _spec(self, owner: str, new: NewBox) -> SandboxSpec:
        template = self.settings.templates.get(new.template, new.template)
        image, allowed = read_image_name(template), self.settings.network
        if not any(fnmatchcase(name, one) for one in self.settings.images for name in (template, image)):
            raise ImageNotFoundError(f"template {new.template!r} is not allowed here", hint="Add it to `e2b.images`.")
        if new.internet and allowed == "none":
            raise ForbiddenError("sandboxes have no internet access here", hint="See `e2b.network`.")
        network = "none" if new.internet is False else allowed
        return SandboxSpec(
            image=image,
            network=tuple(network) if isinstance(network, list) else network,
            env=new.env,
            lifetime_seconds=self.settings.max_seconds,  # and so it takes no warm one from rollouts
            label=f"e2b:{owner}",
        )

    async def _keep(self, box: Box, ticket: Ticket) -> None:
        try:
            with box.scope:
                while box.sandbox.running:  # noqa: ASYNC110 - nothing tells of its end
                    await anyio.sleep(LOOK_SECONDS)
        finally:
            del self._boxes[box.sandbox.id]
            box.scope.cancel()
            for command in box.commands:  # an end waits for what is under way
                command.scope.cancel()
            with anyio.CancelScope(shield=True):
                await box.sandbox.close()
            ticket.release()
            box.ended.set()

    def list(self, owner: str) -> list[Box]:
        """Return the sandboxes of a key, the latest first."""
        return [box for box in reversed(self._boxes.values()) if box.owner == owner]

    def find(self, sandbox_id: str) -> Box | None:
        """Return a sandbox of any key; the caller must check its token."""
        return self._boxes.get(sandbox_id)

    def get(self, owner: str, sandbox_id: str) -> Box:
        box = self._boxes.get(sandbox_id)
        if box is None or box.owner != owner:
            raise NotFoundError(f"sandbox {sandbox_id[:64]!r} was not found", hint="It may have ended.")
        return box
