"""A weight update is applied once or refused, and a backend that fails it returns only with the new weights."""

from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from aiohttp import web
from anyio.abc import SocketAttribute
from pydantic import ValidationError
from structlog.testing import capture_logs

from api_schemas.inference import (
    BackendState,
    DiskWeights,
    DistributedWeights,
    ExternalWeights,
    KvHandling,
    PauseMode,
    WeightsGroupRequest,
    WeightsRequest,
)
from api_schemas.trajectories import Message, Trajectory
from rollout_service.base.errors import StoreError
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    NoBackendError,
    WeightsConflict,
    WeightsPartlyLoaded,
    WeightsUnusable,
)
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.engines.pool import backend_handle
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.weights import controller
from rollout_service.engines.pool.weights.outcomes import check_weights_outcome
from rollout_service.engines.pool.weights.process_groups import ProcessGroups, buckets
from rollout_service.engines.pool.weights.state import PoolState
from rollout_service.server.hangs.reporter import problem_of_engine
from rollout_service.testing import Counting, Fault, ScriptedEngine, ScriptedVllm
from tests.support.engines.pools import OPTIONS, answering, is_exact, request, running, states, weights_in
from tests.support.tokens.characters import session
from tests.support.waiting import collect, until

pytestmark = pytest.mark.anyio


class SlowEngine(ScriptedEngine):
    """Loads weights slowly, can refuse them or break, and records what it loaded."""

    def __init__(self, *, latency: float = 0.0) -> None:
        super().__init__(Counting(), latency=latency)
        self.loads: list[tuple[str, bool]] = []
        self.seconds = 0.0
        self.loading = 0
        self.refuses = False
        self.breaks = False

    async def _update(self, body) -> web.Response:
        self.loading += 1
        assert self.loading == 1, "two updates at once"
        assert body["abort_all_requests"] is False
        await anyio.sleep(self.seconds)
        self.loading -= 1
        if self.refuses or self.breaks:
            message = {"success": False, "message": "no such folder"}
            return web.json_response(message, status=500 if self.breaks else 400)
        self.loads.append((body["weight_version"], body["flush_cache"]))
        return await super()._update(body)


# ---- weights that cannot be sampled with


class NanEngine(ScriptedEngine):
    """Samples nothing with weights from a folder whose name ends in `nan`."""

    async def _generate(self, body, request) -> web.StreamResponse:
        if self._model_path.endswith("nan"):
            self.inject(Fault.BAD_LOGPROB)
        return await super()._generate(body, request)


async def test_weights_that_no_engine_can_sample_with_fail_their_update_and_the_next_one_mends_it():
    async with running(NanEngine(Counting()), NanEngine(Counting())) as (_, pool):
        outcome = await pool.update_weights("/w/nan", 3)
        assert [each.ok for each in outcome.outcomes] == [False, False]
        with pytest.raises(WeightsUnusable, match="can serve version 3") as caught:
            check_weights_outcome(outcome, 3)
        assert "cannot sample with version 3 of the weights from /w/nan: " in str(caught.value)
        assert "logprob 0 is None" in str(caught.value)
        assert "NaN" in caught.value.hint
        assert states(pool) == [BackendState.FAILED] * 2
        probed = [view.failures for view in pool.views()]
        await until(lambda: all(new.failures > old for new, old in zip(pool.views(), probed, strict=True)))
        assert states(pool) == [BackendState.FAILED] * 2, "answering probes is not enough"
        assert "version 3 of the weights from /w/nan" in pool.views()[0].last_error
        mended = await pool.update_weights("/w/4", 4)
        assert [each.ok for each in mended.outcomes] == [True, True]
        await until(lambda: states(pool) == [BackendState.READY] * 2)
        assert (await pool.generate(request())).versions == [4] * 12


async def test_one_engine_that_cannot_sample_with_the_weights_leaves_service():
    async with running(NanEngine(Counting()), ScriptedEngine(Counting())) as (_, pool):
        outcome = await pool.update_weights("/w/nan", 3)
        assert [each.ok for each in outcome.outcomes] == [False, True]
        with pytest.raises(WeightsPartlyLoaded, match="version 3"):
            check_weights_outcome(outcome, 3)
        assert states(pool) == [BackendState.FAILED, BackendState.READY]


async def test_weights_of_a_paused_pool_are_tried_when_it_is_resumed():
    async with running(NanEngine(Counting())) as (_, pool):
        await pool.pause()
        assert (await pool.update_weights("/w/nan", 3)).outcomes[0].ok
        resumed = await pool.resume()
        assert not resumed.outcomes[0].ok
        assert "cannot sample with version 3 of the weights from /w/nan" in resumed.outcomes[0].error
        assert states(pool) == [BackendState.FAILED]


async def test_an_engine_that_joins_is_tried_with_the_weights_that_it_is_given():
    async with running(ScriptedEngine(Counting())) as (_, pool), NanEngine(Counting()) as late:
        await pool.update_weights("/w/nan", 3)
        with pytest.raises(BackendProtocolError, match="version 3 of the weights from /w/nan"):
            await pool.register(SGLangBackend(late.url))
        assert len(pool.views()) == 1


async def test_an_engine_that_is_too_busy_to_be_tried_keeps_serving(monkeypatch):
    monkeypatch.setattr(backend_handle, "TRIAL_SECONDS", 0.05)
    engine = ScriptedEngine(Counting())
    async with running(engine) as (_, pool):
        engine.latency = 5.0
        assert (await pool.update_weights("/w/3", 3)).outcomes[0].ok
        assert states(pool) == [BackendState.READY]


# ---- weights that somebody else gave an engine


async def test_an_engine_that_somebody_else_updates_is_named_until_it_is_given_weights():
    engine = ScriptedEngine(Counting())
    async with running(engine) as (_, pool):
        await pool.update_weights("/w/2", 2)
        assert (await pool.generate(request())).versions == [2] * 12
        assert pool.views()[0].sampled_version is None
        engine.version = "77"
        with capture_logs() as logs:
            for _ in range(2):
                assert (await pool.generate(request())).versions == [77] * 12
        [line] = [line for line in logs if line["event"] == "an engine samples with another version"]
        assert (line["version"], line["given"], line["backend_id"]) == (77, 2, pool.views()[0].backend_id)
        assert (pool.views()[0].weight_version, pool.views()[0].sampled_version) == (2, 77)
        finding = problem_of_engine(pool.views()[0])
        assert (finding.kind, finding.subject) == ("weights", pool.views()[0].backend_id)
        assert "samples with version 77 of the weights, but was given version 2" in finding.message
        await pool.update_weights("/w/78", 78)
        assert pool.views()[0].sampled_version is None
        await pool.generate(request())
        assert pool.views()[0].sampled_version is None


async def test_tokens_of_two_versions_around_an_update_are_no_surprise():
    engine = ScriptedEngine(Counting(), latency=0.3)
    async with running(engine) as (_, pool), anyio.create_task_group() as tasks:
        tasks.start_soon(pool.generate, request(60))
        await until(lambda: engine.in_flight)
        engine.latency = 0.0
        await pool.update_weights("/w/2", 2, PauseMode.IN_PLACE)
        await until(lambda: not engine.in_flight)
        assert pool.views()[0].sampled_version is None


# ---- weights that the trainer loads itself


def external(version: int) -> WeightsRequest:
    return WeightsRequest(source=ExternalWeights(type="external"), version=version)


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_after_the_trainers_word_have_its_version_and_the_engine_is_left_alone(streamed):
    engine = SlowEngine()
    sink = (lambda chunk: None) if streamed else None
    async with running(engine) as (_, pool):
        assert (await pool.generate(request(3), on_tokens=sink)).versions == [0, 0, 0]
        outcome = await pool.load_weights(external(7))
        assert (outcome.changed, outcome.version, outcome.kv) == (True, 7, None)
        assert (await pool.generate(request(3), on_tokens=sink)).versions == [7, 7, 7]
        assert pool.views()[0].sampled_version is None, "nobody else gave it weights"
        assert not (await pool.load_weights(external(7))).changed
        with pytest.raises(WeightsConflict, match="older than the pool's version 7"):
            await pool.load_weights(external(6))
        assert engine.loads == []
        await pool.update_weights("/w/8", 8)
        assert (await pool.generate(request(2))).versions == [8, 8], "the engine reports it"


async def test_an_open_request_keeps_the_version_that_it_began_with():
    engine = ScriptedEngine(Counting(), latency=0.3)
    results = []
    async with running(engine) as (_, pool), anyio.create_task_group() as tasks:
        await pool.load_weights(external(1))
        tasks.start_soon(collect, results, lambda: pool.generate(request(4)))
        await until(lambda: engine.in_flight)
        await pool.load_weights(external(2))
    assert results[0].versions == [1] * 4


async def test_an_engine_that_joins_later_has_the_trainers_weights_and_so_has_another_node():
    async with running(SlowEngine()) as (_, pool):
        await pool.load_weights(external(3))
        state = PoolState.model_validate_json(pool.controller.state().model_dump_json())
        async with SlowEngine() as late:
            await pool.register(SGLangBackend(late.url))
            assert [view.weight_version for view in pool.views()] == [3, 3]
            assert late.loads == []
    async with running(SlowEngine()) as (_, node):
        state = state.model_copy(update={"versions": {node.views()[0].backend_id: 3}})
        node.controller.take_over(state)
        assert (await node.generate(request(2))).versions == [3, 3]


async def test_kv_of_older_weights_is_not_found_through_another_node_or_after_the_trainers_word():
    engine = ScriptedEngine(Counting())
    async with running(engine) as (_, pool), Pools(OPTIONS) as other:
        await other.register(engine.url)
        await pool.update_weights("/w/3", 3, PauseMode.IN_PLACE)
        other["policy"].controller.take_over(pool.controller.state())
        for node in (pool, other["policy"]):
            await node.generate(request(2))
            assert engine.cache_keys[-1] == "weights-3"
        await pool.load_weights(external(4))
        await pool.generate(request(2))
        assert engine.cache_keys[-1] == "weights-4"


# ---- which version


async def test_the_same_version_again_changes_nothing():
    engine = SlowEngine()
    async with running(engine) as (_, pool):
        assert (await pool.update_weights("/w/3", 3)).changed
        again = await pool.update_weights("/w/3", 3)
        assert (again.changed, again.version, again.outcomes[0].ok) == (False, 3, True)
        assert engine.loads == [("3", True)]


async def test_an_older_version_and_other_weights_of_the_same_are_refused_unless_forced():
    engine = SlowEngine()
    async with running(engine) as (_, pool):
        await pool.update_weights("/w/3", 3)
        with pytest.raises(WeightsConflict, match="version 2 is older than the pool's version 3") as caught:
            await pool.update_weights("/w/2", 2)
        assert (caught.value.status, caught.value.context) == (409, {"version": 3})
        with pytest.raises(WeightsConflict, match="from another source"):
            await pool.update_weights("/w/other", 3)
        assert not pool.paused
        outcome = await pool.load_weights(WeightsRequest(path="/w/2", version=2, force=True))
        assert (outcome.outcomes[0].version_before, outcome.outcomes[0].version_after) == (3, 2)
        assert engine.loads == [("3", True), ("2", True)]


async def test_the_version_that_an_engine_came_with_counts():
    engine = SlowEngine()
    engine.version = "5"
    async with running(engine) as (_, pool):
        with pytest.raises(WeightsConflict, match="the pool's version 5"):
            await pool.update_weights("/w/4", 4)
        assert (await pool.update_weights("/w/5", 5)).changed, "which weights they were nobody knows"


async def test_updates_at_once_come_one_after_the_other():
    engine = SlowEngine()
    async with running(engine) as (_, pool), anyio.create_task_group() as tasks:
        engine.seconds = 0.05
        for version in (1, 2, 3):
            tasks.start_soon(pool.update_weights, f"/w/{version}", version)
            await anyio.wait_all_tasks_blocked()
    assert [version for version, _ in engine.loads] == ["1", "2", "3"]


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_kv_of_older_weights_is_kept_in_place_only_and_the_answer_says_which(mode):
    engine = SlowEngine()
    async with running(engine) as (_, pool):
        outcome = await pool.update_weights("/w/1", 1, mode)
        kept = mode is PauseMode.IN_PLACE
        assert outcome.kv is (KvHandling.KEPT if kept else KvHandling.FLUSHED)
        assert engine.loads == [("1", not kept)]


# ---- modes


@pytest.mark.slow
async def test_drain_waits_for_running_requests_and_holds_new_ones():
    engine = SlowEngine(latency=0.3)
    async with running(engine) as (_, pool):
        results = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, results, lambda: pool.generate(request()))
            await until(lambda: engine.in_flight)
            tasks.start_soon(pool.update_weights, "/w/1", 1, PauseMode.DRAIN)
            await until(lambda: pool.paused)
            tasks.start_soon(collect, results, lambda: pool.generate(request()))
        assert [set(each.versions) for each in results] == [{0}, {1}]
        assert engine.aborts == ["*"], "the pause asks for it when nothing runs any more"


@pytest.mark.slow
async def test_drain_is_bounded_and_the_rest_continues_with_the_new_weights():
    engine = SlowEngine()
    async with running(engine) as (_, pool):
        engine.latency = 1.0
        results = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, results, lambda: pool.generate(request(40)))
            await until(lambda: engine.in_flight)
            order = WeightsRequest(path="/w/1", version=1, mode=PauseMode.DRAIN, drain_seconds=0.2)
            outcome = await pool.load_weights(order)
        assert outcome.outcomes[0].in_flight == 1
        assert outcome.held == 1
        assert set(results[0].versions) == {0, 1}
        assert is_exact(results[0], 40)


# ---- failures


async def test_a_backend_that_fails_comes_back_with_the_new_weights_only():
    good, bad = SlowEngine(), SlowEngine()
    async with running(good, bad) as (_, pool):
        bad.breaks = True
        outcome = await pool.update_weights("/w/1", 1)
        first, second = outcome.outcomes
        assert (first.ok, first.version_before, first.version_after) == (True, 0, 1)
        assert (second.ok, second.version_before, second.version_after) == (False, 0, None)
        assert list(second.steps) == ["pause", "load"]
        assert states(pool) == [BackendState.READY, BackendState.FAILED]
        await pool.update_weights("/w/2", 2)
        bad.version = "2"  # as it claims, whatever it has loaded
        bad.breaks = False
        await until(lambda: states(pool) == [BackendState.READY] * 2)
        assert bad.loads == [("2", True)]
        assert {version for version, _ in good.loads} == {"1", "2"}


async def test_a_backend_whose_return_cannot_be_recorded_is_tried_again():
    failures = [StoreError("the store is away")]

    @asynccontextmanager
    async def exclusive(_):
        if pools["policy"].has_served and failures:
            raise failures.pop()
        yield

    async with ScriptedEngine(Counting()) as engine, Pools(OPTIONS, exclusive=exclusive) as pools:
        await pools.register(engine.url)
        engine.healthy = False
        await until(lambda: states(pools["policy"]) == [BackendState.FAILED])
        engine.healthy = True
        await until(lambda: states(pools["policy"]) == [BackendState.READY])
        assert failures == []


async def test_an_unreachable_backend_is_named_and_delays_nobody(monkeypatch):
    monkeypatch.setattr(controller, "_AWAY_SECONDS", 0.1)
    good, away = SlowEngine(), SlowEngine()
    async with running(good, away) as (_, pool):
        away.healthy = False
        await until(lambda: states(pool)[1] is BackendState.FAILED)
        away._routes = dict.fromkeys(away._routes, lambda _: anyio.sleep_forever())
        with anyio.fail_after(10):
            for order in (partial(pool.update_weights, "/w/1", 1), pool.pause, pool.resume, pool.abort):
                outcome = await order()
                assert [(each.ok, each.code) for each in outcome.outcomes] == [(True, None), (False, "out_of_service")]
                assert "before it serves again" in outcome.outcomes[1].error


async def test_a_backend_that_left_service_during_a_pause_is_resumed_since_its_probes_may_sample():
    engine = SlowEngine()
    async with running(engine) as (_, pool):
        await pool.pause()
        engine.healthy = False
        engine._routes["/model_info"] = engine._health
        await until(lambda: states(pool) == [BackendState.FAILED])
        await pool.resume()
        assert not engine.paused


async def test_where_all_refuse_all_keep_what_they_have_and_serve():
    engines = [SlowEngine(), SlowEngine()]
    async with running(*engines) as (_, pool):
        for engine in engines:
            engine.refuses = True
        outcome = await pool.update_weights("/w/1", 1)
        assert (outcome.changed, outcome.version, outcome.kv) == (False, None, None)
        assert [each.version_after for each in outcome.outcomes] == [0, 0]
        assert states(pool) == [BackendState.READY] * 2
        assert set((await pool.generate(request())).versions) == {0}
        assert not any(engine.paused for engine in engines)


@pytest.mark.parametrize("kind", [ScriptedEngine, ScriptedVllm], ids=["sglang", "vllm"])
async def test_an_engine_that_refuses_after_it_has_loaded_does_not_serve_under_its_old_version(kind, tmp_path):
    async def refuse(_) -> web.Response:
        return web.json_response({"message": "the cache was not flushed"}, status=400)

    engine = kind(Counting())
    for path in ("/update_weights_from_disk", "/flush_cache", "/reset_prefix_cache"):
        engine._routes[path] = refuse
    async with running(engine) as (_, pool):
        outcome = await pool.update_weights(weights_in(tmp_path), 1)
        assert [(each.code, each.version_after) for each in outcome.outcomes] == [("backend_protocol_error", None)]
        assert states(pool) == [BackendState.FAILED]


async def test_a_backend_that_takes_too_long_leaves_service():
    quick, slow = SlowEngine(), SlowEngine()
    async with running(quick, slow) as (_, pool):
        slow.seconds = 30.0
        outcome = await pool.load_weights(WeightsRequest(path="/w/1", version=1, timeout_seconds=0.1))
        assert [each.ok for each in outcome.outcomes] == [True, False]
        assert "did not finish within 0.1 s" in outcome.outcomes[1].error
        assert states(pool) == [BackendState.READY, BackendState.FAILED]
        slow.loading = 0


async def test_a_caller_who_hangs_up_leaves_neither_a_pause_nor_half_an_update():
    engines = [SlowEngine(), SlowEngine()]
    async with running(*engines) as (_, pool):
        for engine in engines:
            engine.seconds = 0.2
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.update_weights, "/w/1", 1)
            await until(lambda: all(engine.loading for engine in engines))
            tasks.cancel_scope.cancel()
        assert not pool.paused
        assert [engine.version for engine in engines] == ["1", "1"]
        assert set((await pool.generate(request())).versions) == {1}


async def test_an_empty_pool_refuses_weights():
    async with running(SlowEngine()) as (_, pool):
        await pool.remove(pool.views()[0].backend_id)
        with pytest.raises(NoBackendError):
            await pool.update_weights("/w/1", 1)


# ---- process groups

WEIGHTS = DistributedWeights(
    type="distributed",
    names=["a", "b", "c"],
    dtypes=["float32", "bfloat16", "float32"],
    shapes=[[10], [10, 2], []],
    bucket_bytes=50,
)


def test_tensors_come_in_portions_and_in_order():
    assert [part.names for part in buckets(WEIGHTS)] == [["a"], ["b", "c"]]
    assert [part.shapes for part in buckets(WEIGHTS)] == [[[10]], [[10, 2], []]]
    whole = WEIGHTS.model_copy(update={"bucket_bytes": 1})
    assert [part.names for part in buckets(whole)] == [["a"], ["b"], ["c"]]


class GroupEngine:
    """Records what it is asked about groups and sessions."""

    def __init__(self, refused: str = "", routes: tuple[str, ...] = ()) -> None:
        self.asked: list[tuple[str, dict]] = []
        self._refused = refused
        self._routes = routes

    async def answer(self, http: web.Request) -> web.Response:
        if http.path in self._routes:
            return web.json_response({"error": {"message": "Not Found"}}, status=404)
        if http.path == "/server_info":
            return web.json_response({"tp_size": 2, "dp_size": 1})
        self.asked.append((http.path, await http.json()))
        refused = http.path == self._refused
        return web.json_response({"success": not refused, "message": "no"}, status=400 if refused else 200)


async def test_the_last_portion_carries_the_version_and_no_request_is_aborted():
    engine = GroupEngine()
    async with answering(engine.answer) as backend:
        assert await backend.ranks() == 2
        await backend.receive_weights(WEIGHTS, 4, flush_cache=True)
    paths = [path.strip("/") for path, _ in engine.asked]
    receive = "update_weights_from_distributed"
    assert paths == ["begin_weight_update", receive, receive, "end_weight_update"]
    first, last = engine.asked[1][1], engine.asked[2][1]
    assert (first["names"], first["flush_cache"], first.get("weight_version")) == (["a"], False, None)
    assert (last["names"], last["flush_cache"], last["weight_version"]) == (["b", "c"], True, "4")
    assert not first["abort_all_requests"]
    assert not last["abort_all_requests"]


async def test_a_session_is_closed_when_a_broadcast_fails():
    engine = GroupEngine(refused="/update_weights_from_distributed")
    async with answering(engine.answer) as backend:
        with pytest.raises(BackendRejected):
            await backend.receive_weights(WEIGHTS, 4)
    assert engine.asked[-1][0] == "/end_weight_update"


async def test_an_engine_without_groups_says_what_it_takes_instead():
    group = WeightsGroupRequest(master_address="127.0.0.1", master_port=1, world_size=2)
    async with answering(GroupEngine(routes=("/init_weights_update_group",)).answer) as backend:
        with pytest.raises(BackendRejected, match="cannot take weights from a process group") as caught:
            await backend.join_group(group, 1)
    assert "disk" in caught.value.hint


def test_a_group_holds_while_nobody_leaves_it():
    groups = ProcessGroups()
    groups.add("weights", ["a", "b"])
    groups.check("weights", ["b", "a"])
    with pytest.raises(WeightsConflict, match=r"lacks \['c'\]"):
        groups.check("weights", ["a", "b", "c"])
    with pytest.raises(WeightsConflict, match=r"includes \['b'\]"):
        groups.check("weights", ["a"])
    groups.forget("b")
    with pytest.raises(WeightsConflict, match="has no group 'weights'"):
        groups.check("weights", ["a", "b"])


class GroupedEngine(SlowEngine):
    """Also takes weights from a process group, and can fail to."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[dict] = []
        self.cannot_pause = False
        self._routes |= {
            "/server_info": self._server_info,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._succeed,
            "/begin_weight_update": self._succeed,
            "/end_weight_update": self._succeed,
            "/update_weights_from_distributed": self._receive,
        }

    async def _server_info(self, _) -> web.Response:
        return web.json_response({"tp_size": 2, "pp_size": 1, "dp_size": 1})

    async def _succeed(self, _) -> web.Response:
        return web.json_response({"success": True})

    async def _join(self, body) -> web.Response:
        self.joined.append(body)
        return web.json_response({"success": True})

    async def _receive(self, body) -> web.Response:
        if self.breaks:
            return web.json_response({"success": False, "message": "connection closed by peer"}, status=400)
        self.version = body.get("weight_version") or self.version
        return web.json_response({"success": True})

    async def _pause(self, body) -> web.Response:
        if self.cannot_pause:
            return web.json_response({"message": "cannot pause"}, status=400)
        return await super()._pause(body)


BROADCAST = WeightsRequest(source=WEIGHTS, version=1)


@asynccontextmanager
async def grouped(*engines: GroupedEngine):
    """Yield a pool whose backends have joined a group, and the group."""
    async with (
        running(*engines) as (_, pool),
        await anyio.create_tcp_listener(local_host="127.0.0.1") as trainer,
    ):
        port = trainer.extra(SocketAttribute.local_port)
        group = WeightsGroupRequest(
            master_address="127.0.0.1", master_port=port, world_size=1 + 2 * len(engines), backend="gloo"
        )
        outcome = await pool.controller.join_group(group)
        assert [each.ok for each in outcome.outcomes] == [True] * len(engines)
        assert [each.ranks for each in outcome.outcomes] == [[1, 2], [3, 4]][: len(engines)]
        yield pool, group


async def test_every_backend_gets_its_first_rank_and_the_broadcast():
    engines = [GroupedEngine(), GroupedEngine()]
    async with grouped(*engines) as (pool, _):
        assert [engine.joined[0]["rank_offset"] for engine in engines] == [1, 3]
        outcome = await pool.load_weights(BROADCAST)
        assert (outcome.version, [each.ok for each in outcome.outcomes]) == (1, [True, True])
        assert set((await pool.generate(request())).versions) == {1}
        assert not (await pool.load_weights(BROADCAST)).changed
        assert (await pool.controller.leave_group("weights")).outcomes[0].ok
        with pytest.raises(WeightsConflict, match="has no group"):
            await pool.load_weights(BROADCAST.model_copy(update={"version": 2}))


async def test_a_broadcast_does_not_wait_for_missing_ranks():
    engines = [GroupedEngine(), GroupedEngine()]
    async with grouped(*engines) as (pool, _):
        engines[0].healthy = False
        await until(lambda: states(pool)[0] is BackendState.FAILED)
        with pytest.raises(WeightsConflict, match="includes"):
            await pool.load_weights(BROADCAST)
        engines[0].healthy = True
        await until(lambda: states(pool)[0] is BackendState.READY)
        with pytest.raises(WeightsConflict, match="has no group"):
            await pool.load_weights(BROADCAST)


async def test_no_backend_receives_weights_if_one_cannot_be_paused():
    engines = [GroupedEngine(), GroupedEngine()]
    async with grouped(*engines) as (pool, _):
        engines[0].cannot_pause = True
        outcome = await pool.load_weights(BROADCAST)
        assert not outcome.changed
        assert "could not be paused" in outcome.outcomes[1].error
        assert [engine.version for engine in engines] == ["default", "default"]
        assert states(pool) == [BackendState.READY] * 2
        assert set((await pool.generate(request())).versions) == {0}


async def test_what_failed_in_a_broadcast_comes_back_when_its_version_is_named_as_a_folder():
    good, bad = GroupedEngine(), GroupedEngine()
    async with grouped(good, bad) as (pool, _):
        bad.breaks = True
        outcome = await pool.load_weights(BROADCAST)
        assert [each.version_after for each in outcome.outcomes] == [1, None]
        bad.breaks = False
        await until(lambda: "came over a process group" in (pool.views()[1].last_error or ""))
        assert states(pool) == [BackendState.READY, BackendState.FAILED]
        named = await pool.update_weights("/w/1", 1)
        assert (named.changed, named.outcomes[0].ok) == (False, True)
        await until(lambda: states(pool) == [BackendState.READY] * 2)
        assert (good.loads, bad.loads) == ([], [("1", True)])


async def test_where_all_fail_in_a_broadcast_nobody_knows_what_they_have():
    engine = GroupedEngine()
    async with grouped(engine) as (pool, _):
        engine.breaks = True
        await pool.load_weights(BROADCAST)
        assert states(pool) == [BackendState.FAILED]
        engine.breaks = False
        await until(lambda: "has unknown weights" in (pool.views()[0].last_error or ""))
        assert (await pool.update_weights("/w/2", 2)).outcomes[0].ok
        await until(lambda: states(pool) == [BackendState.READY])
        assert set((await pool.generate(request())).versions) == {2}


async def test_a_group_of_another_size_or_without_a_trainer_is_refused():
    async with grouped(GroupedEngine()) as (pool, group):
        with pytest.raises(WeightsConflict, match="make 3") as caught:
            await pool.controller.join_group(group.model_copy(update={"world_size": 4}))
        assert "world_size to 3" in caught.value.hint
        with pytest.raises(WeightsConflict, match="nothing listens"):
            await pool.controller.join_group(group.model_copy(update={"master_port": 1, "timeout_seconds": 0.1}))


# ---- on the wire


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give either path or source"),
        ({"path": "/w", "source": {"type": "disk", "path": "/w"}}, "give either path or source"),
        ({"source": {"type": "magnet", "path": "/w"}}, "does not match any of the expected tags"),
        (
            {"source": {"type": "distributed", "names": ["a"], "dtypes": [], "shapes": []}},
            "one entry for each tensor",
        ),
    ],
)
def test_a_malformed_order_is_refused(body, message):
    with pytest.raises(ValidationError, match=message):
        WeightsRequest.model_validate({"version": 1} | body)


def test_a_path_is_short_for_a_folder():
    assert WeightsRequest(path="/w", version=1).weights == DiskWeights(path="/w")


# ---- in the trajectory


@pytest.mark.slow
async def test_the_trajectory_says_which_weights_were_loaded_over_kv_that_stayed():
    engine = SlowEngine(latency=0.2)
    async with running(engine) as (_, pool):
        policy = session(pool, stop_token_ids=())
        for version, mode in [(1, PauseMode.ABORT), (2, PauseMode.IN_PLACE), (3, PauseMode.RETRACT)]:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(policy.respond, [Message(role="user", content="a")], max_tokens=90))
                await until(lambda: engine.in_flight)
                await anyio.sleep(0.05)  # a quarter of the turn
                await pool.update_weights(f"/w/{version}", version, mode)
        await pool.update_weights("/w/4", 4, PauseMode.IN_PLACE)
        await policy.respond([Message(role="user", content="a")], max_tokens=4)
    trajectory = policy.trajectory()
    assert trajectory.kept_kv_versions == [2]
    versions = {version for segment in trajectory.segments for version in segment.versions}
    assert versions == {-1, 0, 1, 2, 3, 4}, "what began under the fourth has found no KV of the third"
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory
