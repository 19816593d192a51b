"""A secret is masked in each spelling of it, wherever a text is."""

import io
import json
import logging
import subprocess

import pytest
import structlog

from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.base.masking import mask, mask_error, mask_texts, spellings
from rollout_service.observability.telemetry.logging import configure_logging, hidden_in_log
from rollout_service.settings import LogFormat

QUOTED = "a'b\"c$d\\e`f-1234"
LINES = "-----BEGIN-----\nMIIBVgIBADANBgk\n  qhkiG9w0BAQEFAAS\n}"


@pytest.mark.parametrize("value", [QUOTED, LINES, "schlüssel-1234"])
@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("command", ["export -p", "env", "set", 'set -x; true "$KEY"'])
def test_what_a_shell_prints_of_its_variables_is_masked(value, shell, command):
    environ = {"KEY": value, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([shell, "-c", command], capture_output=True, env=environ, text=True, check=True)

    shown = mask(done.stdout + done.stderr, spellings(value))

    assert "***" in shown
    assert not [part for part in ("1234", "MIIBV", "qhkiG") if part in shown], shown


@pytest.mark.parametrize("written", [repr, json.dumps, lambda text: json.dumps(text, ensure_ascii=False)])
def test_json_and_python_spell_it_so_too(written):
    for value in (QUOTED, LINES):
        assert mask(written(value), spellings(value)) == f"{written(value)[0]}***{written(value)[0]}"


def test_lines_of_a_secret_that_others_have_too_are_left_alone():
    text = "-----BEGIN-----, } and MIIBVgIBADANBgk"

    assert mask(text, spellings(LINES)) == "-----BEGIN-----, } and ***"


def test_of_values_that_contain_each_other_nothing_is_left():
    assert mask("key-long key", ["key", "key-long"]) == "*** ***"


def test_data_is_masked_in_all_its_texts_and_otherwise_as_it_was():
    data = {"a 12345": ["12345", ("12345", 12345)], "n": None, "b": b"12345"}

    assert mask_texts(data, ["12345"]) == {"a ***": ["***", ("***", 12345)], "n": None, "b": b"***"}
    assert mask_texts(data, ()) is data


def test_an_error_its_causes_and_those_in_a_group_are_masked():
    error = EnvironmentFailedError("cannot use 12345", hint="Change 12345.", context={"keys": ["12345"]})
    error.__cause__ = ValueError("bad key 12345")
    group = ExceptionGroup("several", [error])

    mask_error(group, {"12345"})

    assert (str(error), error.hint, str(error.__cause__)) == ("cannot use ***", "Change ***.", "bad key ***")
    assert error.context == {"keys": ["***"]}


@pytest.mark.parametrize("log_format", LogFormat)
def test_the_log_has_no_secret_in_events_tracebacks_and_lines_of_libraries(monkeypatch, log_format):
    before, handlers, level = structlog.get_config(), logging.root.handlers, logging.root.level
    written = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", written)
        configure_logging(log_format, "debug")
    structlog.configure(cache_logger_on_first_use=False)
    try:
        with hidden_in_log(spellings(QUOTED)):
            structlog.get_logger("x").warning("failed", output=QUOTED, detail={"list": [QUOTED]})
            logging.getLogger("library").info("with %s", QUOTED)
            structlog.get_logger("x").error("raised", exc_info=ValueError(QUOTED))
        structlog.get_logger("x").warning("later", output="unmasked-1234")
    finally:
        structlog.configure(**before)
        logging.root.handlers, logging.root.level = handlers, level
    *masked, last = written.getvalue().rstrip().splitlines()
    assert "1234" not in "".join(masked)
    assert "".join(masked).count("***") == 4
    assert "unmasked-1234" in last
