"""`guess-number`: find a hidden number by guesses, with a hint from another model if that is not enough.

Its tools keep what happened in the episode, and one of them asks the engines of another pool.
"""

from __future__ import annotations

from pydantic import JsonValue

from api_schemas.trajectories import Message
from rollout_service.environments import (
    AgentEnvironment,
    Arguments,
    EnvironmentSpec,
    Episode,
    EvaluateIn,
    FunctionTool,
    Score,
    ToolContext,
    ToolInputError,
)

MOST_GUESSES = 7
HINT_POOL = "hints"
ASKED = "Someone looks for the number {number}, and guessed {guesses}. Give a hint in one sentence, and not the number."


class Guess(Arguments):
    """A guess of the policy."""

    number: int


class Nothing(Arguments):
    """A call without arguments."""


def guesses(episode: Episode) -> list[int]:
    made: list[int] = episode.state.setdefault("guesses", [])
    return made


async def guess(arguments: Guess, context: ToolContext) -> str:
    """Compare a guess with the hidden number."""
    made, hidden = guesses(context.require_episode()), context.instance["number"]
    if len(made) == MOST_GUESSES:
        raise ToolInputError(f"there are no more than {MOST_GUESSES} guesses")
    made.append(arguments.number)
    if arguments.number == hidden:
        return "That is it."
    return "It is greater." if arguments.number < int(str(hidden)) else "It is smaller."


async def hint(_: Nothing, context: ToolContext) -> str:
    """Ask the model of another pool, which is not trained, for a hint."""
    episode = context.require_episode()
    asked = ASKED.format(number=context.instance["number"], guesses=guesses(episode) or "nothing")
    said = await episode.require_sampler().sample(
        HINT_POOL, [Message(role="user", content=asked)], max_tokens=64, temperature=0.0
    )
    return said.text


class GuessNumber(AgentEnvironment):
    """Instances: `number`, from 1 to 100."""

    async def evaluate(self, episode: Episode) -> Score:
        """Give a reward for the number, and a part that says how fast it was found."""
        made = guesses(episode)
        found = bool(made) and made[-1] == episode.instance["number"]
        return Score(float(found), {"guesses_left": float(MOST_GUESSES - len(made))})

    def dataset(self) -> list[dict[str, JsonValue]]:
        return [{"number": number} for number in range(1, 101)]


environment = GuessNumber(
    EnvironmentSpec(
        name="guess-number",
        description="Find a hidden number from 1 to 100 by guesses.",
        prompt="Find my number from 1 to 100 in at most seven guesses.",
        tools=["finish"],
        evaluate_in=EvaluateIn.NONE,
    ),
    extra_tools=[
        FunctionTool("guess", "Guess the number.", Guess, guess),
        FunctionTool("hint", "Ask for a hint.", Nothing, hint, parallel=True),
    ],
)
