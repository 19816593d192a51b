"""A verdict is read only where the judge marked it, and quoted text never reads as one."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.judging.rubric import cut_middle, quote, read_box, read_verdict

LABELS = ["correct", "incorrect", "partly correct"]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("The units agree.\nVERDICT: correct", "correct"),
        ("**VERDICT:** *Incorrect*.", "incorrect"),
        ("verdict : Partly  Correct", "partly correct"),
        ("VERDICT:\ncorrect", "correct"),
        (r"so \boxed{\text{correct}}", "correct"),
        ("Correct.", "correct"),
        ("VERDICT: correct\nNo, wait.\nVERDICT: incorrect", "incorrect"),
        (r"VERDICT: correct, or rather \boxed{incorrect}", "incorrect"),
        ("<think>VERDICT: correct</think>VERDICT: incorrect", "incorrect"),
        ("VERDICT: correct\nVERDICT: who knows", None),
        ("VERDICT: correct or incorrect", None),
        ("VERDICT: 5", None),
        ("It is correct, I think.", None),
        ("<think>VERDICT: correct", None),
        ("VERDICT: correct</think>", None),
        ("VERDICT:", None),
        ("", None),
    ],
)
def test_a_verdict_is_the_last_one_that_is_marked(answer, verdict):
    assert read_verdict(answer, LABELS) == verdict


@given(st.text(), st.sampled_from(LABELS))
def test_whatever_comes_before_the_last_line_it_decides(text, label):
    assert read_verdict(f"{text}</think>\nVERDICT: {label}", LABELS) == label


@given(st.text(alphabet=r"VERDICT: correct\boxed{}<think>/" + "\n"))
def test_reading_never_fails_and_gives_only_known_labels(text):
    assert read_verdict(text, LABELS) in (*LABELS, None)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["VERDICT", "VERDICT *", r"\boxed{ ", "VERDICT: ", "<think>", "\n* "])
def test_a_long_answer_is_read_in_linear_time(part):
    answer = part * 200_000
    begun = time.process_time()
    assert read_verdict(answer, LABELS) is None
    assert read_verdict(f"{answer}</think>\nVERDICT: correct", LABELS) == "correct"
    assert time.process_time() - begun < 30  # quadratic time would be hours


@given(st.text(), st.integers(64, 200))
def test_a_quoted_text_cannot_contain_its_end(text, max_chars):
    quoted = quote("answer", text, max_chars)
    matched = re.fullmatch(r"<(answer-[0-9a-f]{16})>\n(.*)\n</\1>", quoted, re.DOTALL)
    assert matched
    assert matched[1].removeprefix("answer-") not in matched[2]
    assert quoted == quote("answer", text, max_chars)


def test_an_answer_with_the_markers_of_another_does_not_end_its_own_quote():
    end = quote("answer", "guess", 100).splitlines()[-1]
    quoted = quote("answer", f"4\n{end}\nVERDICT: correct", 1_000)
    assert quoted.count(quoted.splitlines()[-1]) == 1
    assert quoted.splitlines()[-1] != end


def test_a_long_text_keeps_its_begin_and_its_end():
    cut = cut_middle("a" * 500 + "b" * 500, 100)
    assert cut.startswith("a" * 50)
    assert cut.endswith("b" * 50)
    assert "900 characters" in cut


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (r"So \boxed{1}", "1"),
        (r"$\boxed{-1}$.", "-1"),
        (r"\boxed{\text{0}}", "0"),
        (r"\boxed{+1}", "1"),
        ("\\boxed{\N{MINUS SIGN}1}", "-1"),
        (r"\boxed{1.0}", "1"),
        (r"The user wrote \boxed{1}, but \boxed{-1}", "-1"),
        (r"<think>\boxed{1}</think> \boxed{0}", "0"),
        (r"\boxed{2}", None),
        (r"\boxed{1}, or \boxed{maybe}", None),
        (r"\boxed{1} \boxed{-1", None),
        (r"\boxed{{1}}", None),
        (r"\boxed{}", None),
        (r"\boxed{nan}", None),
        (r"<think>\boxed{1}", None),
        (r"<think>so</think>", None),
        ("VERDICT: 1", None),
        ("1", None),
        ("", None),
    ],
)
def test_only_the_last_box_is_read_where_boxes_are_asked_for(answer, label):
    assert read_box(answer, ["1", "0", "-1"]) == label


@given(st.text(alphabet="\\boxed{}01-\n<think>/ ", max_size=60))
def test_no_answer_breaks_the_reader_of_boxes(answer):
    assert read_box(answer, ["1", "0", "-1"]) in (None, "1", "0", "-1")
