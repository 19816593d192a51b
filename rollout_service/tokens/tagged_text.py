"""Finds the tags of calls among the tokens of a turn in linear time.

renderers 0.1.12 decodes a turn from its start once for each of its tokens: for DeepSeek V4, a turn with 50 calls took 3
s, one with 200 took 43 s, on the event loop. This function stands in for the library's until that is linear.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from renderers import tagged

from rollout_service.tokens.tokenizer import ChatTokenizer, TokenBytes

text_lexemes_of_the_library = tagged._text_lexemes
_Lexeme = tagged._Lexeme


def find_tags_in_linear_time(tokenizer: ChatTokenizer) -> None:
    tagged._text_lexemes = text_lexemes
    _ = tokenizer.token_bytes


def text_lexemes(tokenizer: ChatTokenizer, ids: list[int], offset: int, markers: Mapping[str, str]) -> Iterator[Any]:
    """Yield the library's lexemes: the tags in the text of `ids`, and the text between them.

    A tag covers each token that has a part of it. `offset` is the place of `ids` in the turn.
    """
    table = tokenizer.token_bytes
    if table is None or not markers:
        yield from text_lexemes_of_the_library(tokenizer, ids, offset, markers)
        return
    text, ends = tokenizer.decode(ids), _character_ends(table, ids)
    longest_first = sorted(markers, key=len, reverse=True)
    cursor = 0
    for match in re.finditer("|".join(map(re.escape, longest_first)), text):
        before = bisect_left(ends, match.start()) + 1 if match.start() else 0
        start = before - (ends[before - 1] > match.start()) if before else 0
        end = bisect_left(ends, match.end()) + 1
        yield _Lexeme("text", text[cursor : match.start()], offset, offset + start)
        yield _Lexeme(markers[match[0]], match[0], offset + start, offset + end)
        cursor = match.end()
    yield _Lexeme("text", text[cursor:], offset, offset + len(ids))


def _character_ends(table: TokenBytes, ids: Sequence[int]) -> list[int]:
    """Count the characters after each token; one that is not complete counts as one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ends, length = [], 0
    for part in table.of_ids(ids):
        length += len(decoder.decode(part))
        ends.append(length + bool(decoder.getstate()[0]))
    return ends
