"""The sub-agents of a rollout: a tree whose root is the rollout itself, and how the work was divided in it.

The root is the policy under training. A sub-agent is frozen: its result is an observation of the root, and none of
its tokens is to be trained on. So whoever knows nothing of sub-agents reads the rollout as a sample like any other.

A *step* is one turn of a policy. The steps that follow each other on the longest path are the critical ones (Kimi K2.5,
arXiv 2602.02276, section 3): the sum over the root's turns of its own steps and of the longest sub-agent of that turn.
"""

from __future__ import annotations

from api_schemas.base import Flag, Integer, Name, Real, RolloutId, StrEnum, WireModel
from api_schemas.errors import ErrorInfo
from api_schemas.rollouts.stages import StopReason, Usage
from api_schemas.trajectories import Trajectory


class NodeDetail(StrEnum):
    """How much of the sub-agents is returned with a rollout."""

    NONE = "none"
    """Nothing; `GET /v1/rollouts/{id}/nodes` has them all the same."""
    SUMMARY = "summary"
    """Their prompts, results and figures."""
    TOKENS = "tokens"
    """These and their trajectories."""


class NodeRole(StrEnum):
    """The role of a node of the tree, as seen from its parent."""

    SUBAGENT = "subagent"


class InvalidBecause(StrEnum):
    """Why a sub-agent's result is not valid. The policy reads it all the same, with a line that says why."""

    EMPTY = "empty"
    """Its last message has no text."""
    NO_RESULT = "no_result"
    """Its last message has no `<result>...</result>`."""
    NO_TOOL_CALL = "no_tool_call"
    """It called none of its tools, so it guessed."""
    TRUNCATED = "truncated"
    """Its last turn was cut off."""
    MALFORMED = "malformed"
    """Too many malformed tool calls in a row."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_FULL = "context_full"
    TIMEOUT = "timeout"
    """Its own time ran out; time in a queue does not count."""
    MAX_CRITICAL_STEPS = "max_critical_steps"
    """The rollout's critical steps were used up."""
    SANDBOX_ENDED = "sandbox_ended"
    """It ended the sandbox that it had for itself."""
    CANCELLED = "cancelled"
    """The rollout ended before it did."""
    ERROR = "error"
    """The infrastructure failed, and so did the rollout."""


class NodeParent(WireModel):
    """Where in the tree a sub-agent was started."""

    node_id: str = ""
    """The id of the sub-agent that started it; empty for the rollout itself."""
    turn: Integer
    """The turn of the parent that called it, counted from 0."""
    call_id: str
    """The id of the tool call."""
    wave: Integer
    """The wave of this turn that it ran in, counted from 0: those of one wave run at the same time."""


class NodePrompt(WireModel):
    """The prompt of a sub-agent."""

    system: str
    user: str


class NodeSeconds(WireModel):
    """The time of a sub-agent. The time in the queue counts against no limit."""

    queued: Real = 0.0
    """Waiting for a slot."""
    worked: Real = 0.0
    """From the slot to the result."""
    engine: Real = 0.0
    """The part of `worked` spent waiting for the engine."""
    tools: Real = 0.0
    """The part of `worked` spent in its tools, its own sub-agents included."""


class AgentNode(WireModel):
    """One task that was assigned to a sub-agent."""

    node_id: str
    """`<rollout>/<n>`, with n counted from 1 in the order in which they began."""
    parent: NodeParent
    role: NodeRole = NodeRole.SUBAGENT
    agent: str
    """The name under which it was created."""
    trainable: Flag = False
    """Whether its tokens may be trained on; if not, every entry of its loss masks is 0."""
    pool: Name
    """The pool of engines that served it."""
    model: str
    """The model that the pool served."""
    versions: list[Integer] = []
    """The oldest and the newest version that sampled its tokens; empty if nothing was sampled."""
    prompt: NodePrompt
    result: str = ""
    """The text that the parent read, without the line that says why it is not valid."""
    valid: Flag
    invalid_because: InvalidBecause | None = None
    """Set if and only if the result is not valid."""
    duplicate: Flag = False
    """Whether the same task was assigned before to an agent with the same instructions, white space aside."""
    stop_reason: StopReason | None = None
    error: ErrorInfo | None = None
    usage: Usage = Usage()
    """Of all its tries: a failure of its engine or its own sandbox is retried."""
    main_steps: list[Integer] = []
    """Its own steps, one entry per turn of its last try; see `Work.main_steps`."""
    critical_steps: Integer = 0
    """Its steps on the longest path, those of its own sub-agents included."""
    seconds: NodeSeconds = NodeSeconds()
    sandbox: str | None = None
    """The id of the sandbox that its tools used; null without one."""
    trajectory: Trajectory | None = None
    """Its prompts and completions, with a mask of zeros. Null unless requested by `exports.nodes` as `tokens`."""


class Assigns(WireModel):
    """The calls of `assign_task` by their outcome, over the whole tree."""

    attempted: Integer = 0
    """All of them, malformed ones excepted."""
    executed: Integer = 0
    """Those that began to run; each has a node."""
    valid: Integer = 0
    """Those whose result is valid."""
    duplicate: Integer = 0
    """Those that ran although the same task was assigned before to an agent with the same instructions."""
    over_cap: Integer = 0
    """Those beyond the limit of a turn or of the rollout."""
    refused: Integer = 0
    """Those to an unknown agent, or with an empty or too long field."""
    abandoned: Integer = 0
    """Those in the same turn as the final answer, and those that had not begun when the agent ended."""


class WorkSeconds(WireModel):
    """The time of the root and its sub-agents."""

    critical: Real = 0.0
    """The sum over the root's turns of its own time and of its longest sub-agent, without the time in queues."""
    queued: Real = 0.0
    """The sum over the root's waves of the longest wait for a slot."""
    straggler: Real = 0.0
    """The time in which only one sub-agent of a wave of several was at work."""
    active: Real = 0.0
    """The sum of the time that sub-agents worked, over all of them."""


class Work(WireModel):
    """How the work of a rollout was divided among the root and its sub-agents."""

    main_steps: list[Integer] = []
    """The root's own steps, one entry per turn: 1, or the number of its direct tool calls if those are charged."""
    critical_steps: Integer = 0
    """The steps that follow each other on the longest path, with any number of sub-agents at once."""
    scheduled_steps: Integer = 0
    """The same with the waves that the limit of sub-agents at once made necessary; a user waits for these."""
    total_steps: Integer = 0
    """All steps of the root and of every sub-agent."""
    waves: Integer = 0
    """The number of the root's waves."""
    width_max: Integer = 0
    """The most different tasks that the root assigned in one turn, and that ran."""
    width_mean: Real = 0.0
    """The mean of that number over the turns that assigned any; 0 if none did."""
    balance: Real | None = None
    """The mean over waves of several of (mean steps / most steps) of their sub-agents; null if there was none."""
    created: Integer = 0
    """The number of different sub-agents that the root created."""
    direct_calls: Integer = 0
    """The root's calls of other tools."""
    assigns: Assigns = Assigns()
    seconds: WorkSeconds = WorkSeconds()
    subagent_tokens: Integer = 0
    """The tokens that sub-agents sampled, in all their tries."""
    result_chars: Integer = 0
    """The length of all results that the root read."""


class RolloutNodes(WireModel):
    """The sub-agents of a rollout, whatever its request asks for."""

    rollout_id: RolloutId
    work: Work | None = None
    """How the work was divided among them; null for agents without any."""
    nodes: list[AgentNode]
    """The sub-agents in the order of their calls, without their trajectories."""
