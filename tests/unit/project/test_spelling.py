"""The source, its names and its pages are written in American English."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BRITISH = re.compile(
    r"(?:behavi|col|fav|flav|hon|lab|neighb|rum)our"
    r"|(?:author|categor|final|general|initial|memor|minim|maxim|normal|optim|organ|prior|real|recogn|reinitial|serial"
    r"|special|summar|synchron|token|util|visual)is(?:e|ing|ation)"
    r"|(?:anal|paral)ys(?:e|ing)"
    r"|(?:label|level|marshal|model|signal|travel|tunnel)l(?:ed|ing)(?!by)"
    r"|acknowledgement|artefact|catalogue|(?:de|of)fence|fulfil\b|\bgrey|judgement|\blearnt|licence"
    r"|\bprogramme\b|\bspelt|\btime-out|\btowards|\bwhilst"
)
KEPT = {
    "CHANGELOG.md",  # it has former names
    "rollout_service/environments/builtin/code/functions.py",  # a model reads these texts: they are data
    "tests/unit/project/test_spelling.py",
}
"""Files that are not checked."""


@cache
def is_british(word: str) -> bool:
    """Search each word once, because the pattern is slow."""
    return BRITISH.search(word) is not None


def british(text: str) -> list[str]:
    text = text.lower()
    words = set(re.findall(r"[\w-]+", text))
    return [word for word in words if is_british(word)] + re.findall(r"\bfor ever\b", text)


@pytest.mark.slow
def test_no_file_has_british_spelling():
    patterns = ["*.py", "*.md", "*.toml", "*.sh", "scripts/*"]
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = set(listed.stdout.splitlines()) - KEPT
    found = {path: british(path + "\n" + (ROOT / path).read_text()) for path in sorted(paths)}
    assert not {path: words for path, words in found.items() if words}


@pytest.mark.parametrize(
    "word",
    [
        "hidden_neighbours",
        "Behaviour",
        "normalise_url",
        "renormalises",
        "unlabelled",
        "time-outs",
        "for ever",
    ],
)
def test_a_british_word_is_found(word):
    assert british(f"see {word} there")


@pytest.mark.parametrize("word", ["cancelled", "aria-labelledby", "color", "pairwise", "promise", "four hours"])
def test_other_words_are_not(word):
    assert not british(f"see {word} there")
