"""Arguments of tool calls that a chat format writes without quotes, exactly as they were sampled.

The `renderers` library strips the white space around such values, guesses their types, and ends a value at the first
text that looks like its end. This package reads them again. It is needed for `renderers` up to at least 0.1.13.dev17:
`tests/unit/tokens/arguments/test_library.py` fails once the library reads a format exactly by itself. That format can
then leave the table in `syntax`.
"""

from rollout_service.tokens.arguments.reader import ArgumentReader

__all__ = ["ArgumentReader"]
