"""When connections run out, only a pending or an idle one is evicted, and a flood displaces itself."""

import pytest

from rollout_service.base.errors import ConfigurationError
from rollout_service.http.connections import (
    ConnectionLimits,
    Connections,
    ConnectionSlot,
    EvictionReason,
    network_of,
)


class Bench:
    """Connections whose evictions are recorded."""

    def __init__(self, *, admitted: int = 2, pending: int = 3) -> None:
        self.connections = Connections(ConnectionLimits(admitted=admitted, pending=pending))
        self.evicted: list[tuple[str, EvictionReason]] = []

    def add(self, name: str, address: str = "10.0.0.1") -> ConnectionSlot:
        return self.connections.add(address, lambda why: self.evicted.append((name, why)))


def test_a_flood_from_one_address_displaces_itself():
    bench = Bench(pending=3)
    bench.add("other", "10.0.0.2")
    for number in range(10):
        bench.add(f"flood-{number}")
    assert [name for name, _ in bench.evicted] == [f"flood-{number}" for number in range(8)]
    assert {why for _, why in bench.evicted} == {EvictionReason.PENDING}
    assert bench.connections.counts() == {"pending": 3, "idle": 0, "busy": 0}


def test_admitted_and_pending_connections_have_separate_places():
    bench = Bench(admitted=2, pending=1)
    assert bench.add("a").admit()
    assert bench.add("b").admit()
    for number in range(5):
        bench.add(f"flood-{number}")
    assert [name for name, _ in bench.evicted] == [f"flood-{number}" for number in range(4)]
    assert bench.connections.counts() == {"pending": 1, "idle": 0, "busy": 2}


def test_the_longest_idle_connection_makes_room_and_a_busy_one_never_does():
    bench = Bench(admitted=2)
    first, second = bench.add("first"), bench.add("second")
    assert first.admit()
    assert second.admit()
    second.mark_idle()
    first.mark_idle()
    second.mark_busy()
    assert bench.add("third").admit()
    assert bench.evicted == [("first", EvictionReason.IDLE)]
    assert not bench.add("fourth").admit()
    assert len(bench.evicted) == 1


def test_leaving_is_idempotent_in_every_state():
    bench = Bench()
    pending, busy, idle = (bench.add(name) for name in ("pending", "busy", "idle"))
    assert busy.admit()
    assert idle.admit()
    assert idle.admit()
    idle.mark_idle()
    pending.mark_idle()  # it has no key, so no idle place
    assert bench.connections.counts() == {"pending": 1, "idle": 1, "busy": 1}
    for slot in (pending, busy, idle, idle, busy, pending):
        slot.release()
        slot.mark_busy()
    assert bench.connections.counts() == {"pending": 0, "idle": 0, "busy": 0}


@pytest.mark.parametrize("descriptors", [16, 256, 900, 1_024, 20_000, 1_048_576])
def test_connections_leave_half_of_the_descriptors(descriptors):
    limits = ConnectionLimits.within(descriptors)
    assert 1 <= limits.pending <= 512
    assert 1 <= limits.admitted <= 10_000
    assert limits.pending + limits.admitted <= max(2, descriptors / 2)


def test_a_limit_that_the_process_cannot_bear_is_refused():
    assert ConnectionLimits.within(20_000, 5_000).admitted == 5_000
    with pytest.raises(ConfigurationError, match=r"http\.max_connections is 5000"):
        ConnectionLimits.within(1_024, 5_000)


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_addresses_are_grouped_into_peers(address, site):
    assert network_of(address) == site
