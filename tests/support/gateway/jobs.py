"""Jobs for real programs: what a model of Qwen3's format answers them, step by step.

A job has a name, which its prompt contains, so one engine serves many programs at once. The answers depend only on the
prompt: they go on where an interrupted one ended, at whichever engine.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from pydantic import JsonValue
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollout_service.agents.harnesses.registry import get_harness
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Reply
from rollout_service.tokens import ChatRenderer

IMAGE = "test-harnesses"
"""The image that has the programs of most harnesses that are tested; `ensure_harnesses` builds it."""
IMAGES = {"openhands_sdk": "openhands-sdk"}
"""Images of harnesses that need another Python; it builds these too."""
VOCABULARY = 6_000
CONTEXT = 262_144
ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>"
FILLER = "." * 79
"""The lines that fill an output."""
HELD_SECONDS = 600.0
"""How long an answer takes that is to be interrupted: it is, before it ends."""
HELD_WORDS = 400
"""The length of its reasoning: it has a token every second or two."""
DOCS = Path(__file__).parents[3] / "docs"
_NAMED = re.compile(r"job ([a-z_]+-[a-z]+)\b")

ENVIRONMENT = """
name = "{harness}"
harness = "{harness}"
image = "{image}"
prompt = "Work on the job {{{{ instance.job }}}}: take its steps one by one, then say that you have taken them."
[limits]
max_turns = 64
max_tokens = 1000000
agent_seconds = {seconds}
[sandbox]
memory = "3G"
[evaluate]
command = "python3 /environment/grade.py"
"""
GRADER = """
import json, os, pathlib

steps = json.loads(pathlib.Path(os.environ["ROLLOUT_INSTANCE"]).read_text())["steps"]
file = pathlib.Path("/workspace/steps.txt")
taken = file.read_text().split() if file.exists() else []
reward = float(taken == [str(number) for number in range(steps)])
pathlib.Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps({"reward": reward}))
"""


def write_environment(folder: Path, harness: str, image: str, seconds: float) -> Path:
    """Write an environment whose agent is a harness, and whose grader counts the steps of a job; return its folder."""
    folder.mkdir(parents=True)
    text = ENVIRONMENT.format(harness=harness, image=image, seconds=seconds)
    (folder / "environment.toml").write_text(text)
    (folder / "grade.py").write_text(GRADER)
    return folder


def write_model(folder: Path) -> Path:
    """Write a model of Qwen3's format whose tokens are words of English; return its folder.

    Real programs send prompts of 80,000 characters, and compact what they take for too many tokens: with a tokenizer
    of single bytes, they would do so at once.
    """
    shipped = policy_folder("calc-tuned")
    control = json.loads((shipped / "tokenizer.json").read_text())["added_tokens"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[token["content"] for token in control],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [page.read_text() for page in sorted(DOCS.glob("*/*.md"))]
    tokenizer.train_from_iterator([*texts, *[FILLER] * 100], trainer)
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((shipped / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": CONTEXT}))
    config = json.loads((shipped / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY}))
    return folder


@dataclass(frozen=True, slots=True)
class Job:
    """A task of so many steps for one harness."""

    harness: str
    scenario: str
    steps: int
    output_bytes: int = 0
    """How much each step prints."""
    held: int | None = None
    """The answer that takes long, for as long as it is held."""

    @property
    def name(self) -> str:
        """The name, which is in the prompt."""
        return f"{self.harness}-{self.scenario}"

    def command(self, number: int) -> str:
        """Return the shell command of a step."""
        fill = f"; yes {FILLER} | head -c {self.output_bytes}" if self.output_bytes else ""
        return f"echo {number} >> /workspace/steps.txt{fill}"

    def said(self, number: int) -> str:
        """Return the text of an answer, without its reasoning and its call."""
        return f"Step {number} of {self.name}." if number < self.steps else f"All of {self.name} is done."

    def answer(self, number: int) -> str:
        """Return an answer as the model writes it: a step's call, or the end."""
        check = get_harness(self.harness).check
        command = self.command(number) if number < self.steps else check.end
        call = None if command is None else {"name": check.tool, "arguments": _filled(check.arguments, command)}
        written = "" if call is None else f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        thought = " and on" * (HELD_WORDS if number == self.held else 1)
        return f"<think>\nOn{thought}.\n</think>\n\n{self.said(number)}{written}{END}"


def _filled(arguments: dict[str, JsonValue], command: str) -> dict[str, JsonValue]:
    return {
        name: value.replace("COMMAND", command) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


@dataclass(slots=True)
class JobsScript:
    """What a model answers to the programs that work on jobs; implements `rollout_service.testing.Script`."""

    renderer: ChatRenderer
    jobs: Sequence[Job]
    released: bool = False
    """Whether no answer is held any longer."""
    held: dict[str, float] = field(default_factory=dict)
    """When the long answers began, by the names of their jobs; by the clock of the event loop."""
    asked: Counter[str] = field(default_factory=Counter)
    """How often each job's answers were begun, also for the rest of one that another engine began."""
    _answers: dict[str, list[list[int]]] = field(init=False)
    _header: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._header = self.renderer.encode(ASSISTANT)
        self._answers = {job.name: self.answers(job) for job in self.jobs}

    def answers(self, job: Job) -> list[list[int]]:
        """Return the ids of the answers, the end included."""
        return [self.renderer.encode(job.answer(number)) for number in range(job.steps + 1)]

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        """Return the answer to the first step that the prompt has no answer to, or what it lacks of it."""
        _ = budget
        if self._header[0] not in input_ids:  # a probe
            return Reply(self._header[:1])
        begins = len(input_ids) - list(reversed(input_ids)).index(self._header[0]) + len(self._header) - 1
        given = len(input_ids) - begins
        before = self.renderer.decode(input_ids[:begins])
        found = _NAMED.search(before)
        job = next(job for job in self.jobs if job.name == found[1])
        self.asked[job.name] += 1
        number = next((n for n in range(job.steps) if job.said(n) not in before), job.steps)
        answer = self._answers[job.name][number]
        assert list(input_ids[begins:]) == answer[:given]
        is_held = number == job.held and not self.released
        if is_held:
            self.held.setdefault(job.name, anyio.current_time())
        return Reply(answer[given:], seconds=HELD_SECONDS if is_held else None)
