"""A service's identity tells live services from dead ones, tested with real processes."""

import os
import subprocess
import sys
from dataclasses import replace
from socket import gethostname

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.cluster.identity import ServiceIdentity, is_gone

TELL = """
import sys
from rollout_service.cluster.identity import ServiceIdentity
print(ServiceIdentity.create(), flush=True)
sys.stdin.read()
"""

identities = st.builds(
    ServiceIdentity,
    host=st.text(),
    boot=st.uuids().map(str),
    pid_namespace=st.integers(0, 2**32),
    pid=st.integers(1, 2**22),
    started=st.integers(0, 2**63),
    service=st.integers(0, 2**48 - 1).map(lambda number: f"{number:012x}"),
)


class OtherService:
    """Another process, with its own identity."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.owner = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other():
    service = OtherService()
    yield service
    service.kill()


@given(identities)
def test_an_identity_survives_its_text(identity):
    assert ServiceIdentity.parse(str(identity)) == identity


@given(
    st.text() | identities.map(str).flatmap(lambda text: st.sampled_from([text[1:], text + "0", "0" + text]))
)
def test_nothing_else_parses(text):
    try:
        identity = ServiceIdentity.parse(text)
    except ValueError:
        assert not is_gone(text)
    else:
        assert str(identity) == text


def test_two_services_of_one_process_differ():
    first, second = ServiceIdentity.create(), ServiceIdentity.create()
    assert first != second
    assert (first.pid, first.started) == (second.pid, second.started)
    assert not first.is_gone()
    assert not is_gone(str(second))


def test_a_live_service_on_this_host_is_not_gone_and_a_killed_one_is(other):
    mine, theirs = ServiceIdentity.create(), ServiceIdentity.parse(other.owner)
    assert theirs.host == mine.host == gethostname()
    assert theirs.boot == mine.boot
    assert theirs.pid != os.getpid()
    assert not is_gone(other.owner)
    other.kill()
    assert is_gone(other.owner)


def test_a_process_that_was_not_waited_for_is_gone(other):
    other.process.kill()
    os.waitid(os.P_PID, other.process.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(other.owner)


def test_a_process_id_that_is_used_again_is_another_process():
    mine = ServiceIdentity.create()
    assert replace(mine, started=mine.started - 1).is_gone()


def test_a_service_that_cannot_be_seen_is_not_taken_for_dead(other):
    other.kill()
    theirs = ServiceIdentity.parse(other.owner)
    assert not replace(theirs, boot="00000000-0000-4000-8000-000000000000").is_gone(), "another machine"
    assert not replace(theirs, pid_namespace=theirs.pid_namespace + 1).is_gone(), "another container"
    assert not is_gone(f"{gethostname()}-0123456789abcdef"), "an owner that is no identity"
