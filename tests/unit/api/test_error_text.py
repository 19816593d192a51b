"""An error's message and its hint read as sentences."""

import pytest

from api_schemas.errors import sentences


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("it is used by the process 7", "it is used by the process 7. Stop it."),
        ("it is used.", "it is used. Stop it."),
        ("there is no x; did you mean y?", "there is no x; did you mean y? Stop it."),
    ],
)
def test_a_hint_follows_the_end_of_a_sentence(message, said):
    assert sentences(message, "Stop it.") == said
    assert sentences(message, "") == message
