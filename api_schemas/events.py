"""Events of the service, in order, for dashboards and progress bars."""

from __future__ import annotations

from pydantic import JsonValue

from api_schemas.base import StrEnum, Timestamp, WireModel


class EventKind(StrEnum):
    """Every kind of event. The part before the dot is the type of the event's subject, except for hangs."""

    ROLLOUT_STATE = "rollout.state"
    """A rollout came to a state. Data: `state`, `attempt`, and, if it has them, `reward`, `stop_reason` and `code`."""
    ROLLOUT_CANCEL_REQUESTED = "rollout.cancel_requested"
    """A rollout under way is asked to end. Data: `state`, `attempt`."""
    ROLLOUT_RESUME = "rollout.resume"
    """An interrupted rollout was taken up again. Data: `outcome`, `reason`, `turns`, `seconds`."""
    RUN_STATE = "run.state"
    """A run was created, or came to another state. Data: `state`."""
    RUN_CHANGED = "run.changed"
    """Something else of a run changed: its version, its request, its tasks, its problem, or its waiting work."""
    GROUP_CLOSED = "group.closed"
    """A group is complete. Data: `run`, `state` (`ready` or `dropped`), and the `reason` of a dropped one."""
    BATCH_LEASED = "batch.leased"
    """A trainer got a batch. Data: `run`, `delivery`."""
    BATCH_RETURNED = "batch.returned"
    """A batch will be delivered again, since it was given back or its lease ran out. Data: `run`, `delivery`."""
    BATCH_ACKNOWLEDGED = "batch.acknowledged"
    """A batch never comes again. Data: `run`, `delivery`."""
    BATCH_DISSOLVED = "batch.dissolved"
    """A batch was too stale to be delivered again. Data: `run`, `delivery`."""
    BACKEND_STATE = "backend.state"
    """An engine came to a state, as seen by one node, or was removed. Data: `node`, `pool`, `state` (`ready`,
    `failed`, `draining`, `paused` or `removed`), `was` (null for a new one), and `error`, if it failed."""
    BACKEND_CHANGED = "backend.changed"
    """The list of the engines that services share changed."""
    POOL_PAUSED = "pool.paused"
    """A pool was paused. Data: `mode`."""
    POOL_RESUMED = "pool.resumed"
    """A pool was resumed."""
    POOL_ABANDONED = "pool.abandoned"
    """The lease of a pool's last engine ran out. Data: `rollouts`, how many were cancelled."""
    POOL_COMMAND = "pool.command"
    """Services that share engines carry out a command to a pool. Data: `number`."""
    POOL_HELD = "pool.held"
    """All of these services hold their requests for it. Data: `number`."""
    POOL_SETTLED = "pool.settled"
    """The command is done. Data: `number`."""
    WEIGHTS_UPDATED = "weights.updated"
    """A pool has other weights. Data: `version`, `seconds`, `held_seconds`, `backends`, `failed`."""
    SANDBOX_HOLD = "sandbox.hold"
    """Rollouts of a node began to wait for sandboxes, or no longer do. Data: `state` (`began` or `ended`), `resource`,
    `reason`, `waiting`, and the `seconds` of one that ended."""
    HANG_BEGAN = "hang.began"
    """Something is stuck, slow or held back; the subject is the thing waited for. Data: the fields of a `HangFinding`
    without `usual`, `detail` and `stack`, and `at`."""
    HANG_WORSENED = "hang.worsened"
    """Something that was slow or held back is stuck now. Data: likewise."""
    HANG_ENDED = "hang.ended"
    """It is over. Data: likewise, as it was last."""
    NODE_STATE = "node.state"
    """A node began or stopped to claim rollouts. Data: `state` (`ready` or `draining`)."""
    NODE_JOINED = "node.joined"
    """A node joined those that share the store."""
    NODE_READY = "node.ready"
    """A node was told to claim rollouts."""
    NODE_DRAINING = "node.draining"
    """A node was told to claim no more rollouts."""
    NODE_LEFT = "node.left"
    """A node ended, or was removed."""
    NODE_DEAD = "node.dead"
    """A node was silent for too long. Data: `requeued`, the rollouts that were queued again."""


class Event(WireModel):
    """Something that happened in the service."""

    event_id: int
    """A number that grows by one per event, also across restarts; a reader can resume after it."""
    time: Timestamp
    kind: str
    """The kind of event, one of `EventKind`; later releases may add others."""
    subject: str
    """The id of its subject, such as a rollout or a backend."""
    data: dict[str, JsonValue] = {}
