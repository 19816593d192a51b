"""The engines of a trainer stay with the service whatever becomes of some, and leave it with the trainer."""

import json
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from threading import Event, Thread
from urllib.parse import unquote

import httpx
import pytest
from anyio import from_thread

from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.errors import ClientError
from tests.support.processes.service import eventually
from tests.support.web_server import Answer, Asked, web_server

pytestmark = pytest.mark.slow(seconds=1)
GOOD, BAD = "http://10.0.0.2:1", "http://10.0.0.1:1"  # engines are asked in this order: the bad one first
SECONDS = 20.0


class Service:
    """The routes of the service for engines; those at `BAD` cannot be registered after `lost`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.versions: dict[str, int] = {}
        self.told: list[dict[str, object]] = []
        self.lost: set[str] = set()
        self.wait: Callable[[str], object] = lambda url: None

    def answer(self, asked: Asked) -> Answer:
        path = unquote(asked.path)
        self.asked.append(f"{asked.method} {path}")
        body = json.loads(asked.body) if asked.body else {}
        match asked.method, path.removeprefix("/v1/"):
            case "POST", "backends":
                url = body["url"].rstrip("/")
                self.wait(url)
                if url in self.lost:
                    return 422, {}, json.dumps(problem(422)).encode()
                self.versions[f"{body['pool']}@{url}"] = 0
                return 200, {}, json.dumps(view(f"{body['pool']}@{url}", 0)).encode()
            case "GET", "backends":
                return 200, {}, json.dumps([view(*each) for each in self.versions.items()]).encode()
            case "POST", "weights":
                self.told.append(body)
                self.versions = dict.fromkeys(self.versions, body["version"])
                return 200, {}, json.dumps({"pool": body["pool"], "outcomes": []}).encode()
        backend_id = path.removeprefix("/v1/backends/").removesuffix("/renew")
        if backend_id not in self.versions:
            return 404, {}, json.dumps(problem(404)).encode()
        if asked.method == "DELETE":
            del self.versions[backend_id]
        return 200, {}, b""

    def lose(self, url: str) -> None:
        self.lost.add(url)
        self.versions = {one: version for one, version in self.versions.items() if not one.endswith(url)}

    def renewals(self, url: str) -> int:
        return sum(one.endswith(f"@{url}/renew") for one in self.asked)


def problem(status: int) -> dict[str, object]:
    return {"title": "Refused", "status": status, "detail": "no", "code": "refused"}


def view(backend_id: str, version: int) -> dict[str, object]:
    pool, _, url = backend_id.partition("@")
    rest = dict.fromkeys(("context_length", "in_flight", "served", "failures"), 0)
    return {
        **rest,
        "backend_id": backend_id,
        "url": url,
        "pool": pool,
        "state": "ready",
        "model_path": "",
        "tokenizer_path": "",
        "weight_version": version,
    }


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    with web_server(service.answer) as found:
        yield f"http://{found}"


@pytest.fixture
def trainers(address: str) -> Iterator[TrainerEngines]:
    made = TrainerEngines("areal", RolloutSubmitter(address), lease_seconds=1)
    yield made
    made.close()


def follow(trainers: TrainerEngines, *urls: str, version: int | None = None) -> RolloutSubmitter:
    with from_thread.start_blocking_portal() as portal:
        return portal.call(trainers.follow, urls, version)


def test_an_engine_that_is_gone_keeps_no_lease_from_the_others(service, trainers) -> None:
    follow(trainers, GOOD, BAD)
    service.lose(BAD)
    before = service.renewals(GOOD)
    eventually(lambda: service.renewals(GOOD) > before + 1, seconds=SECONDS)


def test_leases_are_renewed_while_another_engine_is_registered(service, trainers) -> None:
    renewed = Event()
    service.wait = lambda url: url == GOOD or renewed.wait(SECONDS)
    follow(trainers, GOOD)
    adding = Thread(target=follow, args=(trainers, GOOD, BAD))
    adding.start()
    try:
        eventually(lambda: service.renewals(GOOD) > 1, seconds=SECONDS / 2)
    finally:
        renewed.set()
        adding.join()
    assert {one.partition("@")[2] for one in service.versions} == {GOOD, BAD}


def test_a_service_that_was_started_anew_is_told_the_version_again(service, trainers) -> None:
    follow(trainers, GOOD, version=8)
    service.told.clear()
    service.versions = dict.fromkeys(service.versions, 9)  # by another process of the trainer
    before = service.renewals(GOOD)
    eventually(lambda: service.renewals(GOOD) > before + 1, seconds=SECONDS)
    assert service.told == []
    service.versions = dict.fromkeys(service.versions, 0)  # as its engine says
    eventually(lambda: service.told, seconds=SECONDS)
    assert (service.told[0]["version"], service.told[0]["force"]) == (8, False)


def test_leases_are_renewed_after_an_error_of_the_machine(service, trainers, monkeypatch) -> None:
    follow(trainers, GOOD)
    errors, context = [OSError(24, "Too many open files")], httpx.create_ssl_context

    def create_ssl_context() -> ssl.SSLContext:
        if errors:
            raise errors.pop()
        return context()

    monkeypatch.setattr(httpx, "create_ssl_context", create_ssl_context)
    eventually(lambda: not errors, seconds=SECONDS)
    before = service.renewals(GOOD)
    eventually(lambda: service.renewals(GOOD) > before, seconds=SECONDS)


def test_a_pool_has_the_name_of_the_engines_that_it_began_with(service, trainers, address) -> None:
    service.lost.add(BAD)
    with pytest.raises(ClientError):
        follow(trainers, BAD)
    other = TrainerEngines("areal", RolloutSubmitter(address))
    assert follow(trainers, GOOD).pool == follow(other, GOOD).pool
    other.close()


def test_the_engines_are_removed_when_the_trainer_ends(service, address) -> None:
    program = f"""if True:
        import anyio
        from rollout_client.adapters.engines import TrainerEngines
        from rollout_client.adapters.submit import RolloutSubmitter

        engines = TrainerEngines("areal", RolloutSubmitter({address.replace("127.0.0.1", "localhost")!r}))
        anyio.run(engines.follow, [{GOOD!r}], 3)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (service.versions, done.stderr) == ({}, "")
    assert [one.split()[0] for one in service.asked] == ["POST", "POST", "DELETE"]
