"""Renders the sub-agents of a rollout for people: who did what, when, and whether it was of use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from api_schemas.rollouts.trees import AgentNode, RolloutNodes, Work
from rollout_service.base.terminal_text import escape_controls
from rollout_service.cli.common import count

RESULT_CHARS = 100


def render_tree(found: RolloutNodes) -> RenderableType:
    children: dict[str, list[AgentNode]] = defaultdict(list)
    for node in found.nodes:
        children[node.parent.node_id].append(node)
    tree = Tree(Text(found.rollout_id, style="bold"))
    _add(tree, children[""], children)
    parts: list[RenderableType] = [] if found.work is None else [Text(summary(found.work))]
    parts.append(tree if found.nodes else Text("no sub-agents"))
    return Group(*parts)


def summary(work: Work) -> str:
    steps = f"{work.critical_steps} critical"
    if work.scheduled_steps != work.critical_steps:
        steps += f", {work.scheduled_steps} with waves"
    assigns = work.assigns
    return (
        f"steps: {steps}, {work.total_steps} in total; "
        f"{count(assigns.attempted, 'assign')}, {assigns.executed} run, {assigns.valid} valid; "
        f"at most {work.width_max} at once; {count(work.direct_calls, 'direct call')}"
    )


def _add(tree: Tree, nodes: Sequence[AgentNode], children: dict[str, list[AgentNode]]) -> None:
    for node in nodes:
        below = tree.add(_label(node))
        _add(below, children[node.node_id], children)


def _label(node: AgentNode) -> Text:
    number = node.node_id.rpartition("/")[2]
    at = f"turn {node.parent.turn}, wave {node.parent.wave}"
    agent = escape_controls(node.agent).replace("\n", "\\n")
    text = Text(f"{number} {agent}", style="bold")
    text.append(f"  {at}  ", style="not bold dim")
    text.append(_validity(node), style="not bold green" if node.valid else "not bold yellow")
    text.append(
        f"  {count(node.critical_steps, 'step')}, {node.seconds.worked:.1f} s"
        f" after {node.seconds.queued:.1f} s in the queue",
        style="not bold",
    )
    if line := _first_line(node.result):
        text.append(f"\n{line}", style="not bold dim")
    return text


def _validity(node: AgentNode) -> str:
    valid = "valid" if node.valid else f"not valid: {node.invalid_because}"
    return f"{valid}, duplicate" if node.duplicate else valid


def _first_line(result: str) -> str:
    line = next((line for line in result.split("\n") if line.strip()), "")
    line = escape_controls(line.strip())
    return line if len(line) <= RESULT_CHARS else f"{line[:RESULT_CHARS]}..."
