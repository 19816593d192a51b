"""A saved page of a canned rollout, made as the service makes it."""

from collections.abc import Mapping
from pathlib import Path

import orjson
from pydantic import BaseModel

from rollout_service.server.dashboard.saved_page import saved_page
from tests.support.browser.fake_service import FakeService
from tests.support.browser.trajectories import CannedRollout


def save(rollout: CannedRollout, folder: Path, more: Mapping[str, BaseModel] | None = None) -> str:
    """Write the file, with `more` answers by their paths below the rollout's, and return its address."""
    service = FakeService()
    rollout.serve(service)
    answers = {request.removeprefix("GET /"): body for request, (_, body) in service.answers.items()}
    answers["about"] = orjson.dumps(
        {"rollout_id": rollout.rollout_id, "saved_at": "2026-03-05T12:00:00Z", "version": "0.1.0"}
    )
    path = f"v1/rollouts/{rollout.rollout_id}"
    trajectory = rollout.trajectory()
    for index, segment in enumerate(rollout.segments):
        count = len(segment.pieces)
        tokens = rollout.tokens(trajectory, index, 0, count)
        answers[f"{path}/tokens?segment={index}&start=0&count={count}"] = tokens.model_dump_json().encode()
    answers |= {f"{path}/{name}": answer.model_dump_json().encode() for name, answer in (more or {}).items()}
    file = folder / f"{rollout.rollout_id}.html"
    file.write_bytes(saved_page(f"Rollout {rollout.rollout_id}", answers))
    return file.as_uri()
