"""Examples of request and response bodies, by operation id.

Guarantee: a service with the built-in environments accepts every request.
"""

from __future__ import annotations

from typing import Any

TASK = {"environment": "calc", "instance": {"question": "What is 6 * 7?", "answer": "42"}}

REQUESTS: dict[str, Any] = {
    "submit_rollout": {
        "rollout_id": "first-42",
        "task": TASK,
        "limits": {"max_turns": 8},
        "metadata": {"epoch": 1},
    },
    "end_rollout": {"reward": 1.0, "reward_parts": {"tests": 1.0}, "attempt": 1},
    "abort_rollouts": {"rollout_ids": ["first-42"]},
    "create_run": {
        "run_id": "calc-1",
        "source": {"kind": "inline", "tasks": [TASK]},
        "group_size": 4,
        "batch_size": 1,
        "max_staleness": 2,
        "advantages": "group_norm",
    },
    "patch_run": {"version": 7},
    "append_tasks": {"tasks": [TASK], "offset": 0, "close": True},
    "rescore_run": {"replay": "needed"},
    "rescore_rollouts": {
        "environment": "calc",
        "rollouts": [
            {
                "request": {"task": TASK},
                "rollout": {
                    "rollout_id": "first-42",
                    "state": "failed",
                    "task": TASK,
                    "pool": "policy",
                    "created_at": "2026-01-01T00:00:00Z",
                },
            }
        ],
    },
    "open_session": {"user": "alice", "train": True, "metadata": {"client": "chat"}},
    "give_feedback": {"value": -1.0, "text": "answer in French"},
    "set_canary": {"pool": "policy", "candidate": "policy-next", "share": 0.05},
    "register_backend": {"url": "http://127.0.0.1:30000", "pool": "policy", "kind": "sglang"},
    "update_weights": {"path": "/checkpoints/step-10", "version": 10},
    "join_weights_group": {"master_address": "10.0.0.1", "master_port": 29500, "world_size": 3},
    "patch_node": {"rollout": {"workers": 64}, "sandboxes": {"ceiling": 128}},
    "pause_pool": {"pool": "policy", "mode": "abort"},
    "resume_pool": {"pool": "policy"},
    "process": {
        "job_id": "job-1",
        "instance": {"data_source": "calc", "question": "What is 6 * 7?", "answer": "42"},
        "sampling_params": {"temperature": 1.0},
    },
    "cancel_job": {"job_id": "job-1"},
    "add_llm_server": {"address": "127.0.0.1:30000"},
}

_ROLLOUT = {
    "rollout_id": "first-42",
    "state": "completed",
    "task": TASK,
    "pool": "policy",
    "attempt": 1,
    "reward": 1.0,
    "stop_reason": "finished",
    "usage": {"turns": 2, "prompt_tokens": 310, "sampled_tokens": 41, "tool_calls": 2},
    "created_at": "2026-01-01T00:00:00Z",
    "finished_at": "2026-01-01T00:00:04Z",
}
_RUN = {
    "run_id": "calc-1",
    "state": "running",
    "request": REQUESTS["create_run"],
    "version": 0,
    "tasks": 1,
    "cursor": 1,
    "acceptance_rate": 0.5,
    "counts": {"open": 1},
    "created_at": "2026-01-01T00:00:00Z",
}

RESPONSES: dict[str, dict[str, Any]] = {
    "submit_rollout": {
        "200": _ROLLOUT,
        "202": {**_ROLLOUT, "state": "queued", "reward": None, "finished_at": None},
    },
    "get_rollout": {"200": _ROLLOUT},
    "list_rollouts": {"200": {"rollouts": [_ROLLOUT], "counts": {"completed": 1}}},
    "create_run": {"201": _RUN},
    "get_run": {"200": _RUN},
    "list_runs": {"200": {"runs": [_RUN]}},
    "acknowledge_batch": {"200": {"batch_id": "calc-1.b0", "state": "acknowledged"}},
}
"""The examples of each operation, by status."""

PROBLEM = {
    "type": "about:blank",
    "title": "Invalid field",
    "status": 422,
    "detail": "body.task.environment: there is no environment 'clac'; did you mean calc? Known environments: calc.",
    "code": "invalid_field",
    "retryable": False,
    "errors": [
        {"path": "body.task.environment", "message": "there is no environment 'clac'; did you mean calc?"}
    ],
    "context": {"environments": ["calc"]},
}
