"""The folder of a job of Slurm."""

from pathlib import Path

import pytest

from rollout_service.cluster.slurm.folder import JobFolder


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "job")
    made.create()
    return made
