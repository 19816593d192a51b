"""The settings of live sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from api_schemas.base import Name
from rollout_service.settings.values import Names, Section


class LiveJudgeSettings(Section):
    """The judge of turns, and of hints in hindsight."""

    pool: Name = "judge"
    """The pool of engines that judges. Without a backend in service, turns wait."""
    votes: int = Field(3, ge=1, le=99)
    """How often the judge is asked about each turn; the value with most valid votes counts."""
    vote_seconds: float = Field(60.0, gt=0)
    """How long one vote may take."""
    max_tokens: int = Field(1_024, ge=1)
    """The most tokens of one vote."""
    temperature: float = Field(0.6, ge=0)
    """The temperature of votes."""
    prompt: Path | None = None
    """A file with the judge's prompt, in Jinja2; left out is the prompt that comes with the service."""
    hints: bool = False
    """Whether to ask for hints in hindsight, too."""
    hint_prompt: Path | None = None
    """A file with the prompt for hints, in Jinja2; left out is the prompt that comes with the service."""
    hint_selection: Literal["longest", "overlap"] = "longest"
    """Which of the proposed hints counts: the longest, or the one under which the likeliest tokens of a teacher overlap
    most with those of the policy, which needs a pool that returns them."""
    teacher_pool: Name | None = None
    """The pool that reads answers with the hint, for runs that ask for a teacher; left out is the session's own."""
    text_chars: int = Field(8_192, ge=256)
    """Answers and next states that are longer are cut in the middle before they are judged."""
    overrides: Names = []
    """Rules that decide before the judge, in order, such as `tool_error`, `truncated` and `repeated_call`."""
    at_once: int = Field(8, ge=1)
    """The most turns that are judged at the same time."""
    queue: int = Field(256, ge=1)
    """The most turns that wait in memory; the others wait in the store."""


class LiveKey(Section):
    """A key for clients that send `X-Session-Id` instead of opening sessions."""

    name: str = Field(min_length=1, max_length=128)
    """A name for people. Keys of one name and tenant share their clients' sessions, so that a key can be replaced."""
    key: SecretStr
    """At least 16 characters of visible ASCII."""
    tenant: Name = "default"
    """The tenant of its sessions."""
    user: str | None = Field(None, max_length=256)
    """The user of its sessions; left out, each id that a client sends is a user of its own."""
    pool: Name = "policy"
    """The pool that answers."""
    train: bool = False
    """Whether its sessions may be stored, judged and trained on, unless a request says otherwise."""


class LiveSettings(Section):
    """Live sessions: served traffic that becomes training data where its users agree."""

    train: bool = False
    """Whether sessions that don't say may be stored, judged and trained on."""
    turn_kind: Literal["main", "side"] = "main"
    """The kind of a request that does not declare one, in sessions that were not opened by a request of their own."""
    keys: list[LiveKey] = []
    """Keys for clients that send `X-Session-Id`."""
    max_sessions: int = Field(10_000, ge=1)
    """The most open sessions; more are refused with 429."""
    idle_seconds: float = Field(1_800.0, gt=0)
    """A session without a request for this long is closed."""
    max_age_seconds: float = Field(86_400.0, gt=0)
    """A session is closed at this age."""
    hold_seconds: float = Field(30.0, gt=0)
    """How long a request waits while its pool is paused; then it is refused with 503, and nothing is recorded."""
    requests_per_minute: int | None = Field(None, ge=1)
    """The most requests of one user in a minute; more are refused with 429. One that asks for several answers counts as
    so many. Left out sets no limit."""
    quarantine_sessions: int = Field(0, ge=0)
    """The first sessions of a new user that are judged and not trained on."""
    retention_seconds: float = Field(604_800.0, gt=0)
    """How long turns are kept that no run took."""
    opt_out_seconds: float = Field(7_776_000.0, gt=0)
    """How long it is known which messages of a conversation were not to be stored, since its last request without
    consent. They are kept as salted hashes."""
    retention_bytes: int | None = Field(None, ge=1)
    """The most bytes that are kept for one user; the oldest closed sessions go first. Left out sets no limit."""
    detectors: Names = ["secrets"]
    """The detectors that search a turn before it is stored: names of built-in ones, or of plug-ins. A turn with a match
    is not trained on, and its text is not stored."""
    share_prefixes: bool = False
    """Whether tenants may share cached prefixes on an engine, which can reveal to one of them the prompts of
    another."""
    judge: LiveJudgeSettings = LiveJudgeSettings()
