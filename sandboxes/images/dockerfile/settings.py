"""The instructions that make no layer: each changes what is known of its stage."""

from collections.abc import Callable, Mapping

from sandboxes.images.dockerfile.parser import Instruction
from sandboxes.images.dockerfile.plan import BuildPlan, platform_arguments
from sandboxes.images.dockerfile.stages import StageState
from sandboxes.images.dockerfile.words import split_words

KEPT_AS_LABELS = {
    "EXPOSE": "expose",
    "HEALTHCHECK": "healthcheck",
    "STOPSIGNAL": "stopsignal",
    "VOLUME": "volume",
}
Handler = Callable[[BuildPlan, StageState, Instruction], None]


def _arg(plan: BuildPlan, state: StageState, one: Instruction) -> None:
    for word in split_words(one.text, plan.parsed.escape):
        name, equals, default = word.partition("=")
        known = platform_arguments() | dict(plan.arguments)
        otherwise = state.expand(default, plan.parsed.escape) if equals else known.get(name)
        value = plan.given.get(name, otherwise)
        if value is not None:
            state.args[name] = value


def _env(plan: BuildPlan, state: StageState, one: Instruction) -> None:
    state.env |= _pairs(plan, state, one)


def _label(plan: BuildPlan, state: StageState, one: Instruction) -> None:
    state.labels |= _pairs(plan, state, one)


def _pairs(plan: BuildPlan, state: StageState, one: Instruction) -> dict[str, str]:
    escape = plan.parsed.escape
    words = split_words(one.text, escape)
    if "=" not in words[0]:  # the old form: one name, and the rest of the line
        name, _, value = one.text.partition(" ")
        return {state.expand(name, escape): state.expand(value.strip(), escape)}
    pairs = (word.partition("=") for word in words)
    return {state.expand(name, escape): state.expand(value, escape) for name, _, value in pairs}


def _maintainer(_plan: BuildPlan, state: StageState, one: Instruction) -> None:
    state.labels["maintainer"] = one.text


def _keep_as_label(plan: BuildPlan, state: StageState, one: Instruction) -> None:
    flags = "".join(f"--{name}={value} " for name, value in one.flags)
    plain = one.keyword == "HEALTHCHECK"
    text = flags + (one.text if plain else state.expand(one.text, plan.parsed.escape))
    state.labels[f"docker.{KEPT_AS_LABELS[one.keyword]}"] = text if one.array is None else one.text


def _user(plan: BuildPlan, state: StageState, one: Instruction) -> None:
    state.user = state.expand(one.text, plan.parsed.escape)


def _shell(_plan: BuildPlan, state: StageState, one: Instruction) -> None:
    state.shell = one.array or ()


def _start_command(_plan: BuildPlan, state: StageState, one: Instruction) -> None:
    words = one.array if one.array is not None else (*state.shell, one.text)
    if one.keyword == "ENTRYPOINT":
        state.entrypoint, state.command = words, ()
    else:
        state.command = words


SETTINGS: Mapping[str, Handler] = {
    "ARG": _arg,
    "ENV": _env,
    "USER": _user,
    "SHELL": _shell,
    "LABEL": _label,
    "MAINTAINER": _maintainer,
    "ENTRYPOINT": _start_command,
    "CMD": _start_command,
} | dict.fromkeys(KEPT_AS_LABELS, _keep_as_label)
"""What each does to the state of a stage of a plan. They raise ValueError for text that means nothing."""
