"""Calls of agents that keep their own history are put together from the sampled ids, and never from their text."""

from dataclasses import replace
from random import Random

import pytest

from api_schemas.trajectories import FinishReason, ForkReason, SegmentRole
from rollout_service.base.errors import InvalidFieldError
from rollout_service.engines.shipped import policy_folder
from rollout_service.gateway.capture import CapturePolicy, EchoMatch, TurnCapture
from rollout_service.gateway.contract import ClientMessage, Lane, raw_call_text
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.gateway.echoing import BASH, CLIENTS, OTHER, EchoingClient, Habits, answer, ask, write
from tests.support.gateway.requests import rendered
from tests.support.tokens.chat_formats import hub_tokenizer, load

ODD = '{"timeout": 5000.0,  "command":"ls \\u00e9"}'
"""Arguments that come back from most clients in another spelling."""
TASK = [ClientMessage("system", "Be brief."), ClientMessage("user", "List the files.")]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    return {
        "qwen3": ChatRenderer.load(policy_folder("calc-tuned"), "qwen3"),
        "qwen3.5": load(folder / "qwen3.5", "qwen3.5"),
    }


@pytest.fixture(params=["qwen3", "qwen3.5"])
def renderer(request, renderers):
    return renderers[request.param]


@pytest.fixture
def capture(renderer):
    return TurnCapture(renderer)


@pytest.fixture
def client(capture):
    return EchoingClient(capture, Habits(), Random(0), list(TASK))


def check(capture, answered):
    """Check that every token is once in the trajectory, as it was sampled; return the trajectory."""
    trajectory = capture.trajectory()
    check_invariants(trajectory)
    found = {}
    for segment in (*trajectory.segments, *trajectory.untrained):
        for token, turn, mask in zip(segment.token_ids, segment.turn_ids, segment.loss_mask, strict=True):
            if mask:
                found.setdefault(turn, []).append(token)
    assert [found.get(turn, []) for turn in range(len(answered))] == [one.output_ids for one in answered]
    assert capture.report().disagreements == 0
    return trajectory


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_every_continuation_of_16_turns_is_in_one_segment(capture, renderer, name):
    client = EchoingClient(capture, CLIENTS[name], Random(0), list(TASK))
    for number in range(15):
        calls = [("bash", ODD)] * (1 + (number % 4 == 3))
        ids = write(renderer, "  On it.\n" * (number % 2), *calls, reasoning="First look." * (number % 3))
        client.turn(ids, f"file {number}", "again")
    client.turn(write(renderer, "Done."))
    (segment,) = check(capture, client.turns).segments
    assert segment.fork_reason is ForkReason.FIRST
    report = capture.report()
    assert report.forks == {ForkReason.FIRST: 1}
    assert sum(report.standings.values()) >= 15
    assert EchoMatch.TEXT_CHANGED not in report.standings
    if name in ("codex", "mini_swe_agent"):
        assert set(report.standings) == {EchoMatch.EXACT}


@pytest.mark.parametrize("name", CLIENTS)
def test_malformed_calls_and_cut_answers_do_not_break_a_conversation(capture, renderer, name):
    client = EchoingClient(capture, CLIENTS[name], Random(1), list(TASK))
    client.turn(write(renderer, "Hm", ("bash", '{"command": oops}')), "not JSON")
    client.messages.append(ClientMessage("user", "Again."))
    cut = ask(
        capture,
        client.call(),
        write(renderer, "Let me", reasoning="So", stop=False),
        client.random,
        finish=FinishReason.LENGTH,
    )
    assert cut.end.finish is FinishReason.LENGTH
    client.keep(cut)
    client.messages.append(ClientMessage("user", "Output limit hit, go on."))
    client.turn(write(renderer, "Done."))
    assert len(check(capture, client.turns).segments) == 1
    assert capture.report().malformed_calls == 1


@pytest.mark.parametrize("name", ["qwen_code", "claude"])
def test_a_segment_begins_with_what_the_models_own_template_writes(renderers, name):
    renderer = renderers["qwen3"]
    capture = TurnCapture(renderer)
    client = EchoingClient(capture, CLIENTS[name], Random(0), list(TASK))
    client.messages.insert(1, ClientMessage("developer", "Use English."))
    for number in range(6):
        client.turn(write(renderer, "Look.", ("bash", ODD)), f"file {number}")
    client.messages[4] = client.messages[4]._replace(text="cleared")
    client.turn(write(renderer, "Done."))
    client.tools = ()
    client.turn(write(renderer, "A title."))
    check(capture, client.turns)
    for begun, tools in ((0, [BASH]), (6, [BASH]), (7, ())):
        at = len([m for m in client.messages if m.role == "assistant"]) - len(client.turns) + begun
        messages, seen = [], 0
        for message in client.messages:
            if message.role == "assistant":
                if seen == at:
                    break
                seen += 1
            messages.append(message)
        if begun == 0:
            messages = [*TASK[:1], ClientMessage("developer", "Use English."), TASK[1]]
        call = replace(client.call(), messages=tuple(messages), tools=tools)
        assert rendered(hub_tokenizer(), call) == list(client.turns[begun].planned.prompt_ids)
    forks = capture.report().forks
    assert forks == {ForkReason.FIRST: 1, ForkReason.HISTORY_EDITED: 1, ForkReason.TOOLS_CHANGED: 1}


def test_a_malformed_call_may_come_back_as_the_text_that_it_was_sent_as(renderers):
    client = EchoingClient(TurnCapture(renderers["qwen3"]), CLIENTS["gemini_cli"], Random(0), list(TASK))
    [call] = client.turn(write(renderers["qwen3"], "Hm", ("bash", '{"command": oops}'))).message.calls
    text = f"Hm{raw_call_text(call.name, call.arguments)}"
    client.messages[-1] = client.messages[-1]._replace(text=text, calls=())
    client.messages.append(ClientMessage("user", "Again."))
    client.turn(write(renderers["qwen3"], "Done."))
    assert len(check(client.capture, client.turns).segments) == 1


@pytest.mark.parametrize("named", [{"text"}, {"reasoning", "text"}, {"reasoning", "text", "calls"}])
def test_an_answer_may_be_named_in_the_place_of_being_sent(capture, client, renderer, named):
    answered = client.turn(write(renderer, "Look.", ("bash", ODD), reasoning="Hm."), "file")
    answer, *results = client.messages[-2:]
    left_out = {part: value for part, value in (("text", ""), ("reasoning", None), ("calls", ())) if part in named}
    key = answered.planned.turn_key
    client.messages[-2:] = [answer._replace(turn_key=key, references=frozenset(named), **left_out), *results]
    client.turn(write(renderer, "Done."))
    (segment,) = check(capture, client.turns).segments
    assert segment.fork_reason is ForkReason.FIRST
    assert set(capture.report().standings) == {EchoMatch.EXACT}


def test_an_answer_that_nobody_gave_cannot_be_named(capture, client):
    client.messages.append(ClientMessage("assistant", turn_key="other", references=frozenset({"text"})))
    with pytest.raises(InvalidFieldError, match="item of no answer"):
        capture.plan(client.call())


def test_parallel_calls_of_one_prompt_are_branches(capture, client, renderer):
    client.turn(write(renderer, "", ("bash", "{}")), "a file")
    planned = [capture.plan(client.call()) for _ in range(3)]
    answered = [answer(capture, one, write(renderer, f"Answer {n}."), client.random) for n, one in enumerate(planned)]
    trajectory = check(capture, [*client.turns, *answered])
    assert [len(set(segment.turn_ids) - {-1}) for segment in trajectory.segments] == [2, 1, 1]
    assert {segment.fork_reason for segment in trajectory.segments[1:]} == {ForkReason.BRANCH}
    client.keep(answered[1])
    client.messages.append(ClientMessage("user", "More."))
    client.turn(write(renderer, "Done."))
    assert capture.trajectory().segments[1].turn_ids[-1] == 4


def test_an_answer_that_was_not_delivered_is_kept_and_not_trained_on(capture, client, renderer):
    lost = ask(capture, client.call(), write(renderer, "Lost."), client.random, delivered=False)
    client.turn(write(renderer, "Found."))
    trajectory = check(capture, [lost, *client.turns])
    (segment,), (leaf,) = trajectory.segments, trajectory.untrained
    assert (segment.fork_reason, set(segment.turn_ids)) == (ForkReason.FIRST, {-1, 1})
    assert (leaf.role, set(leaf.turn_ids)) == (SegmentRole.MAIN, {-1, 0})
    assert capture.report().undelivered == 1


def test_the_conversation_ends_with_the_last_answer_that_its_client_received(capture, client, renderer):
    lost = ask(capture, client.call(), write(renderer, "Lost."), client.random, delivered=False)
    assert capture.messages()[-1].content == "Lost.", "nothing else was said"
    client.turn(write(renderer, "The answer is 2."))
    client.messages.append(ClientMessage("user", "Are you sure?"))
    cut = ask(capture, client.call(), write(renderer, "Hm", stop=False), client.random, delivered=False)
    trajectory = check(capture, [lost, *client.turns, cut])
    assert [message.role for message in trajectory.messages] == ["system", "user", "assistant"]
    assert trajectory.messages[-1].content == "The answer is 2."


@pytest.mark.parametrize("first", [True, False])
def test_a_title_is_a_side_call_whenever_it_comes(capture, client, renderer, first):
    def title():
        messages = (ClientMessage("system", "Write a title."), TASK[1])
        call = replace(client.call(json_schema={"type": "object"}), messages=messages, tools=())
        return ask(capture, call, write(renderer, '{"title": "Files"}'), client.random)

    calls = [title()] if first else []
    client.turn(write(renderer, "", ("bash", "{}")), "a file")
    calls += client.turns if first else [*client.turns, title()]
    trajectory = check(capture, calls)
    (side,) = trajectory.untrained
    assert (side.role, side.fork_reason, side.parent) == (SegmentRole.SIDE, ForkReason.NEW_ROOT, None)
    assert [segment.fork_reason for segment in trajectory.segments] == [ForkReason.FIRST]


def test_a_turn_that_had_to_fit_a_schema_is_not_trained_on(capture, client, renderer):
    first = client.turn(write(renderer, "Reading.", ("bash", '{"command": "ls"}')), "a.py")
    shaped = ask(capture, client.call(json_schema={"type": "object"}), write(renderer, '{"a": 1}'), client.random)
    client.keep(shaped)
    client.messages.append(ClientMessage("user", "And now?"))
    last = client.turn(write(renderer, "Done."))
    trajectory = check(capture, [first, shaped, last])
    assert [sorted({*segment.turn_ids} - {-1}) for segment in trajectory.segments] == [[0], [2]]
    [segment] = trajectory.untrained
    assert segment.role is SegmentRole.MAIN
    assert [each.turn.parent is None for each in capture.turns.values()] == [True, False, False]


def test_an_answer_ends_with_its_log_probabilities_if_asked(capture, client, renderer):
    ids = write(renderer, "Reading é.")
    answered = ask(capture, client.call(logprobs=True), ids, client.random)
    assert [token.logprob for token in answered.end.logprobs] == [-0.5] * len(ids)
    assert [token.text for token in answered.end.logprobs] == [renderer.decode([one]) for one in ids]
    assert ask(capture, client.call(), ids, client.random).end.logprobs == ()


def test_an_agent_that_the_agent_started_is_trained_on_only_if_asked(renderer):
    for trains in (frozenset({SegmentRole.MAIN}), frozenset({SegmentRole.MAIN, SegmentRole.SUBAGENT})):
        capture = TurnCapture(renderer, CapturePolicy(trains=trains))
        main = EchoingClient(capture, Habits(), Random(0), list(TASK))
        said = EchoingClient(capture, Habits(), Random(0), [*TASK[:1], ClientMessage("user", "Sub.")])
        said.lane = Lane(agent="agent-1")
        other = EchoingClient(capture, Habits(), Random(0), [ClientMessage("user", "Remember.")], (OTHER,))
        for one in (main, said, other, said, main):
            one.turn(write(renderer, "", (one.tools[0]["function"]["name"], "{}")), "ok")
        trajectory = capture.trajectory()
        check_invariants(trajectory)
        subagents = trajectory.untrained if len(trains) == 1 else trajectory.segments[1:]
        assert [segment.role for segment in subagents] == [SegmentRole.SUBAGENT] * 2
        roles = [each.turn.role for each in capture.turns.values()]
        assert [role is SegmentRole.MAIN for role in roles] == [True, False, False, False, True]


def test_a_compaction_goes_on_from_its_summary(capture, client, renderer):
    client.turn(write(renderer, "", ("bash", "{}")), "a file")
    summary = "The folder has one file, which was listed already.\nNothing else is to be done but to read it."
    asked = replace(client.call(), messages=(ClientMessage("user", "Sum up: list the files, a file"),), tools=())
    compacted = ask(capture, asked, write(renderer, summary), client.random)
    client.messages = [TASK[0], ClientMessage("user", f"So far:\n{compacted.message.text}\nGo on.")]
    last = client.turn(write(renderer, "Done."))
    trajectory = check(capture, [client.turns[0], compacted, last])
    assert [segment.fork_reason for segment in trajectory.segments] == [
        ForkReason.FIRST,
        ForkReason.NEW_ROOT,
        ForkReason.COMPACTION,
    ]
    assert trajectory.untrained == []
    assert trajectory.segments[2].parent == 1


def edit_result(client):
    client.messages[3] = client.messages[3]._replace(text="cleared")


def drop_answer(client):
    del client.messages[4:]
    client.messages.append(ClientMessage("user", "Your answer was not valid."))


def change_answer(client):
    client.messages[-1] = client.messages[-1]._replace(text="Something else.", calls=(), turn_key=None)
    client.messages.append(ClientMessage("user", "More."))


def add_foreign(client):
    client.messages += [
        ClientMessage("user", "More."),
        ClientMessage("assistant", "[done]"),
        ClientMessage("user", "And?"),
    ]


def change_tools(client):
    client.tools = (BASH, OTHER)
    client.messages.append(ClientMessage("user", "More."))


def change_system(client):
    client.messages[0] = ClientMessage("system", "Be long.")
    client.messages.append(ClientMessage("user", "More."))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (edit_result, ForkReason.HISTORY_EDITED),
        (drop_answer, ForkReason.ANSWER_MISSING),
        (change_answer, ForkReason.ANSWER_CHANGED),
        (add_foreign, ForkReason.FOREIGN_ASSISTANT),
        (change_tools, ForkReason.TOOLS_CHANGED),
        (change_system, ForkReason.SYSTEM_CHANGED),
    ],
)
def test_a_segment_begins_for_the_reason_that_holds(capture, client, renderer, change, reason):
    client.turn(write(renderer, "", ("bash", "{}")), "a file")
    client.turn(write(renderer, "It has a file."))
    change(client)
    client.turn(write(renderer, "Done."))
    trajectory = check(capture, client.turns)
    assert [segment.fork_reason for segment in trajectory.segments] == [ForkReason.FIRST, reason]
    assert trajectory.segments[1].parent == 0
    assert trajectory.segments[1].shared_prefix > 0
    client.messages.append(ClientMessage("user", "More."))
    client.turn(write(renderer, "Done again."))
    assert len(check(capture, client.turns).segments) == 2


def test_a_call_of_the_policy_keeps_its_ids_whatever_its_client_makes_of_it(capture, client, renderer):
    answered = client.turn(write(renderer, "", ("bash", "{}")), "unknown tool")
    call = client.messages[2].calls[0]
    renamed = replace(call, name="invalid", arguments='{"tool": "bash"}')
    client.messages[2] = client.messages[2]._replace(calls=(renamed,))
    client.turn(write(renderer, "Done."))
    assert len(check(capture, client.turns).segments) == 1
    assert capture.report().standings == {EchoMatch.ARGUMENTS_REWRITTEN: 1}
    assert answered.message.calls[0].id.startswith(f"call_{answered.planned.turn_key}")


def test_a_rewritten_answer_may_be_refused(renderer):
    strict = TurnCapture(renderer, CapturePolicy(extends=frozenset({EchoMatch.EXACT})))
    client = EchoingClient(strict, CLIENTS["qwen_code"], Random(0), list(TASK))
    client.turn(write(renderer, "", ("bash", ODD)), "a file")
    client.turn(write(renderer, "Done."))
    reasons = [segment.fork_reason for segment in check(strict, client.turns).segments]
    assert reasons[1:] == [ForkReason.ANSWER_CHANGED]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_interleavings_keep_every_token_once(renderers, seed):
    random = Random(seed)
    renderer = renderers[random.choice(["qwen3", "qwen3.5"])]
    capture = TurnCapture(renderer)
    clients = [EchoingClient(capture, random.choice(list(CLIENTS.values())), random, list(TASK)) for _ in range(3)]
    for number, client in enumerate(clients):
        client.lane = Lane(agent="" if number < 2 else f"agent-{number}")
    flying, answered, lost = [], [], set()
    for _ in range(40):
        if len(flying) < 8 and random.random() < 0.6:
            client = random.choice(clients)
            edit(random, client)
            flying.append((client, capture.plan(client.call())))
        elif flying:
            client, planned = flying.pop(random.randrange(len(flying)))
            calls = [("bash", random.choice([ODD, "{}", "oops", '{"command": "a"}']))] * random.choice([0, 1, 1, 2])
            text = random.choice(["", "Hm.", "é🙂", "  "])
            ids = write(renderer, text, *calls, reasoning=random.choice(["", "So."]), stop=random.random() < 0.9)
            delivered = random.random() < 0.9
            one = answer(capture, planned, ids, random, delivered=delivered)
            lost |= set() if delivered else {len(answered)}
            answered.append(one)
            if delivered and random.random() < 0.8:
                client.keep(one, "result", "other")
                client.messages.append(ClientMessage("user", "Go on."))
    trajectory = check(capture, answered)
    assert sum(capture.report().forks.values()) == len(trajectory.segments) + len(trajectory.untrained)
    for segment in trajectory.segments:
        assert not lost & set(segment.turn_ids)


def edit(random, client):
    """Change a client's history as clients do, or not."""
    kind = random.random()
    if kind < 0.1 and len(client.messages) > 3:
        place = random.randrange(2, len(client.messages))
        client.messages[place] = client.messages[place]._replace(text="cleared")
    elif kind < 0.15 and len(client.messages) > 3:
        del client.messages[random.randrange(2, len(client.messages)) :]
    elif kind < 0.2:
        client.tools = random.choice([(BASH,), (BASH, OTHER), ()])
    elif kind < 0.25:
        client.messages = [TASK[0], ClientMessage("user", f"So far: {client.messages[-1].text}")]
    if client.messages[-1].role == "assistant":
        client.messages.append(ClientMessage("user", "More."))
