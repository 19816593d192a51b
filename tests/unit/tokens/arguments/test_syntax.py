"""A value that quotes the markup around it is read whole, and a careless text as far as it goes."""

import pytest

from rollout_service.tokens.arguments import SYNTAX


def read(family, text):
    return list(SYNTAX[family].argument.read(text))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n",
            {"a": "\n1\n", "b": "\n2\n"},
        ),
        ("<parameter=a>1</parameter><parameter=b>2</parameter>", {"a": "1", "b": "2"}),
        ("<parameter=a>echo '</parameter>'; ls</parameter>\n</function>", {"a": "echo '</parameter>'; ls"}),
        (
            "<parameter=a>cat <<E\n<parameter=b>\n</parameter>\n</function>\nE\n</parameter>\n</function>",
            {"a": "cat <<E\n<parameter=b>\n</parameter>\n</function>\nE\n"},
        ),
        ("<parameter=a>1</parameter> and more", {"a": "1"}),
        ("<parameter=a>1</parameter>\n</function> and more", {"a": "1"}),
        ("<parameter=a>1<parameter=b>2</parameter>", {"a": "1<parameter=b>2"}),
        ("<parameter=a>1</parameter><parameter=b>2", {"a": "1"}),
        ("</parameter><parameter=a>", {}),
        ("", {}),
    ],
)
def test_a_close_counts_where_the_format_goes_on(text, found):
    assert dict(read("qwen3.5", text)) == found


def test_white_space_of_a_value_is_kept():
    assert read("laguna-xs.2", "<arg_key>a</arg_key>\n <arg_value>\n 1 </arg_value>\n") == [("a", "\n 1 ")]
    assert read("minimax-m2", '<parameter name="a">\r\n</parameter>\n') == [("a", "\r\n")]


def test_parts_are_read_in_time_that_grows_with_the_text():
    text = "<parameter=a>x</parameter>junk" * 20_000
    assert len(read("qwen3.6", text)) == 20_000
