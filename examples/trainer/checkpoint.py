"""Checkpoints that survive `kill -9`: folders that an engine can load, with the trainer's state.

Guarantees: a checkpoint exists completely or not at all, since it is written elsewhere and then renamed. It names the
last batch that it includes, so a batch that is delivered again is not trained on twice.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

STATE = "trainer.pt"
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
KEPT = 3
"""The number of newest checkpoints to keep; an engine that comes back may still be given the one before the last."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    steps: int


class Checkpoints:
    """The checkpoints of one training, in one folder."""

    def __init__(self, folder: Path, base: Path) -> None:
        """Use `folder`. The tokenizer and configuration of `base`, the initial policy, go into each checkpoint."""
        self.folder = folder
        self._base = base
        self._held = folder / "held"
        folder.mkdir(parents=True, exist_ok=True)
        for rest in folder.glob(".writing-*"):  # left by a process that was killed while writing
            shutil.rmtree(rest)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint; None if there is none."""
        return max(self._all(), key=lambda each: each.steps, default=None)

    def save(self, model: torch.nn.Module, state: dict[str, Any]) -> Checkpoint:
        """Write the weights, and the state that `load_state` returns; delete all but the newest checkpoints."""
        steps = int(state["steps"])
        written, final = self.folder / f".writing-{steps}", self.folder / f"step-{steps}"
        written.mkdir()
        save_file(weights_of(model), written / "model.safetensors", metadata={"format": "pt"})
        for name in COPIED:
            if (self._base / name).exists():
                shutil.copy(self._base / name, written / name)
        torch.save(state, written / STATE)
        for file in written.iterdir():
            _to_disk(file)
        written.rename(final)
        _to_disk(self.folder)
        for old in sorted(self._all(), key=lambda each: each.steps)[:-KEPT]:
            shutil.rmtree(old.folder)
        return Checkpoint(final, steps)

    def hold(self, batch_id: str) -> None:
        """Record the batch that the trainer is working on."""
        self._held.write_text(batch_id)

    def held(self) -> str | None:
        """Return the batch that this process or a killed one recorded last."""
        return self._held.read_text() if self._held.exists() else None

    def _all(self) -> list[Checkpoint]:
        found = ((path, re.fullmatch(r"step-(\d+)", path.name)) for path in self.folder.iterdir())
        return [Checkpoint(path, int(match[1])) for path, match in found if match]


def load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint.folder / STATE, weights_only=True)
    return state


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors by name, in order; a head that is tied to the embedding is not repeated."""
    return {name: tensor.detach().contiguous() for name, tensor in sorted(model.named_parameters())}


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
