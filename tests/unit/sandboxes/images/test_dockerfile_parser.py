"""The reader of Dockerfiles: lines, continuations, here-documents, flags, words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.errors import DockerfileError
from sandboxes.images.dockerfile.parser import Instruction, parse
from sandboxes.images.dockerfile.words import expand, expand_heredoc, split_words

TEXT = r"""# syntax=docker/dockerfile:1
ARG V=12
FROM debian:${V} AS base
RUN apt-get update && \
    # a comment

    apt-get install -y \
      jq
RUN <<EOF
set -e
echo $HOME
EOF
run cat <<-'X' >/a && echo $((1 << 2)) <<<"y"
	hi
	X
COPY --chown=1:1 --chmod=0644 ["a b", "/c d/"]
COPY <<A <<"B" /etc/
v=$V
A
$V
B
RUN --mount=type=cache,target=/c --network=none -- true
CMD ["a", 1]
"""


def only(text: str) -> Instruction:
    (found,) = parse(text).instructions
    return found


def test_lines_continuations_heredocs_and_flags():
    found = parse(TEXT).instructions
    assert [(one.keyword, one.line) for one in found] == [
        ("ARG", 2),
        ("FROM", 3),
        ("RUN", 4),
        ("RUN", 9),
        ("RUN", 13),
        ("COPY", 16),
        ("COPY", 17),
        ("RUN", 22),
        ("CMD", 23),
    ]
    assert found[2].text.split() == ["apt-get", "update", "&&", "apt-get", "install", "-y", "jq"]
    assert (found[3].text, found[3].heredocs[0].text) == ("<<EOF", "set -e\necho $HOME\n")
    assert [(doc.name, doc.text, doc.expands) for doc in found[4].heredocs] == [("X", "hi\n", False)]
    assert (found[5].flags, found[5].array) == ((("chown", "1:1"), ("chmod", "0644")), ("a b", "/c d/"))
    assert [(doc.name, doc.expands) for doc in found[6].heredocs] == [("A", True), ("B", False)]
    assert (found[7].flag("mount"), found[7].flag("network"), found[7].text) == (
        "type=cache,target=/c",
        "none",
        "true",
    )
    assert found[8].array is None, "an array of strings, or no array"


def test_the_escape_directive():
    text = "# escape=`\nFROM windows\nRUN dir `\n  C:\\\nENV a=`$b"
    assert [one.text for one in parse(text).instructions] == ["windows", "dir   C:\\", "a=`$b"]
    assert only("\n# escape=`\nRUN a \\\n b").text == "a  b", "a directive comes first"
    with pytest.raises(DockerfileError, match="Dockerfile:1: the escape character"):
        parse("# escape=x\nFROM a")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("FROM a\nCOYP b c", "Dockerfile:2: 'COYP' is not an instruction", "did you mean COPY?"),
        ("FROM a\n\nRUN", "Dockerfile:3: RUN needs arguments", ""),
        ("RUN a <<EOF\nx\n", "Dockerfile:1: the here-document EOF has no end", "end it with a line EOF"),
    ],
)
def test_errors_have_a_line_and_a_hint(text, message, hint):
    with pytest.raises(DockerfileError) as caught:
        parse(text)
    assert str(caught.value) == message
    assert caught.value.hint == hint


VARIABLES = {"a": "1", "empty": "", "space": "x y", "quoted": "'"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$a${a}b", "11b"),
        ("${none:-x}${empty:-x}${empty-x}${none-x}", "xxx"),
        ("${a:+x}${empty:+x}${empty+x}${none+x}", "xx"),
        ("${none:-${empty:-$a}}", "1"),
        ('${none:-"a b"}', "a b"),
        ("'$a'\"$a\"\\$a", "$a1$a"),
        (r'"\"\$a\\ \n"', r'"$a\ \n'),
        ("$space$quoted", "x y'"),
        ("$none$1$@-$", "-$"),
        ("${a:?must}", "1"),
        ("trailing\\", "trailing\\"),
    ],
)
def test_words_are_expanded(text, expected):
    assert expand(text, VARIABLES) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${a", "} is missing|nothing"),
        ("'a", "single quote"),
        ('"a', "double quote"),
        ("${none:?give one}", "give one"),
        ("${empty:?}", "empty is not set"),
        ("${a//x/y}", "is not known"),
        ("${}", "name is missing"),
    ],
)
def test_wrong_words_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        expand(text, VARIABLES)


def test_heredocs_keep_their_quotes():
    assert expand_heredoc('it\'s "$a" \\$a \\n\n', VARIABLES) == 'it\'s "1" $a \\n\n'


PLAIN = st.text(
    st.characters(blacklist_categories=["Cs", "Cc", "Z"], blacklist_characters="'\"\\$"), min_size=1
)


@given(st.lists(PLAIN, max_size=6), st.sampled_from([" ", "\t", "  "]))
def test_words_without_quotes_are_what_split_makes(words, between):
    assert split_words(between.join(words)) == between.join(words).split()


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="'\0")))
def test_single_quotes_keep_everything(text):
    assert expand(f"'{text}'", {}) == text
    assert split_words(f"a'{text}'b c") == [f"a'{text}'b", "c"]


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_parsed_or_refused_with_a_line(head, tail):
    text = f"{head}\nFROM a\nRUN {tail}"
    try:
        found = parse(text).instructions
    except DockerfileError as error:
        assert 1 <= error.line <= len(text.splitlines()) + 1  # noqa: PT017
        return
    assert all(one.text or one.keyword == "HEALTHCHECK" for one in found)


@given(st.lists(st.text(st.sampled_from("ab \t$"), min_size=1).map(str.strip).filter(bool), min_size=1))
def test_continuations_lose_nothing(parts):
    joined = only("RUN x" + "".join(f" \\\n# comment\n\n {part}" for part in parts))
    assert joined.text.split() == " ".join(["x", *parts]).split()
    assert joined.line == 1
