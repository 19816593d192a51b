"""Puts layers on stages: each step that changes files makes one, unless the same step has made it before.

A layer's key is a hash of its parent's key, the instruction, the variables that it sees, and the content of the files
that it copies. Whatever fails is named with file, line and instruction.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sandboxes.errors import ImageBuildError
from sandboxes.images.dockerfile.layers import LayerStore, make_key
from sandboxes.images.dockerfile.namespace import Line, Sender, StepJob, StepResult
from sandboxes.images.dockerfile.parser import Instruction
from sandboxes.images.dockerfile.stages import StageState


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a plan is carried out."""

    network: Literal["host", "none"] = "host"
    max_bytes: int | None = None
    """The most that all files of an image may take on disk, those of its base included."""

    fresh: str = ""
    """Something that no other build has, to use no layer of another; "" uses them."""


class LayerBuilder:
    """Makes the layers of one build of `file`, and says which."""

    def __init__(self, file: str, layers: LayerStore, say: Line, options: BuildOptions) -> None:
        self.layers = layers
        self.namespace = layers.namespace
        self.say = say
        self.options = options
        self._file = file

    def write(
        self, state: StageState, one: Instruction, job: StepJob, content: str, data: Sender | StepJob
    ) -> None:
        """Add a layer of files that are sent to the step; `content` says which they are."""
        parts = (job.dest, job.cwd, job.owner, job.mode, job.many, content)
        self.do(state, one, make_key(state.key, one.keyword, *parts), job, data)

    def do(
        self,
        state: StageState,
        one: Instruction,
        key: str,
        job: StepJob,
        data: Sender | StepJob | None = None,
    ) -> None:
        """Add a layer of what a step changes."""
        most = self.options.max_bytes

        def fill(changes: Path) -> StepResult:
            left = 0 if most is None else max(1, most - state.size_bytes)
            return self.namespace.run(replace(job, changes=changes, max_bytes=left), self.say, data=data)

        self.add(state, one, key, fill)

    def add(self, state: StageState, one: Instruction, key: str, fill: Callable[[Path], StepResult]) -> None:
        """Put a layer on a stage: one that is there, or one that is made now.

        Raises:
            ImageBuildError: The step failed, or the image is too large.
        """
        for below in state.layers:
            self.layers.find(below.key)  # a long build goes on to use them
        layer, what = self.layers.find(key), f"{self.where(one)}: {one}"
        if one.keyword != "FROM":
            self.say(what if layer is None else f"{what} (unchanged)")
        if layer is None:

            def checked(changes: Path) -> None:
                result = fill(changes)
                if result.full:
                    raise self._too_large(one)
                if result.exit_code or result.error:
                    raise self.failed(one, result)

            layer = self.layers.make(
                key, str(one), checked, lambda: self.say(f"{what} (waiting for another build)")
            )
        state.key, state.layers = key, (layer, *state.layers)
        if self.options.max_bytes is not None and state.size_bytes > self.options.max_bytes:
            raise self._too_large(one)

    def where(self, one: Instruction) -> str:
        """Return the file and line of an instruction."""
        return f"{self._file}:{one.line}"

    def failed(self, one: Instruction, result: StepResult) -> ImageBuildError:
        """Return the error of a step that failed."""
        how = result.error or f"failed with exit code {result.exit_code}"
        if result.exit_code < 0:
            how = result.error or f"was ended by signal {-result.exit_code}"
        return ImageBuildError(
            f"{self.where(one)}: {one}: {how}",
            hint="look for the cause in the step's last lines" if result.last_lines else "",
            output="\n".join(result.last_lines),
        )

    def _too_large(self, one: Instruction) -> ImageBuildError:
        most = (self.options.max_bytes or 0) / 1e9
        return ImageBuildError(
            f"{self.where(one)}: {one}: the image takes more than {most:g} GB",
            hint="raise --max-gb, or let the same step remove what it needs only for itself",
        )
