"""Kinds of engines are plug-ins: what cannot be used is named with its reason, and stops no other."""

import subprocess
import sys
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest

from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.engines.kinds.registry import GROUP, EngineKinds
from rollout_service.engines.pool.pools import Pools
from rollout_service.testing import Counting, ScriptedEngine

pytestmark = pytest.mark.anyio

KINDS = """
from rollout_service.engines.kinds.sglang.backend import SGLangBackend

class Acme(SGLangBackend):
    pass

class Unfinished:
    def __init__(self, url, backend_id):
        self.id, self.url, self.keeps_kv_apart = backend_id, url, False

    async def generate(self, request, on_tokens=None): ...

def picky(url):
    return Acme(url)

number = 3
"""
ENTRY_POINTS = f"""
[{GROUP}]
sglang = rollout_service.engines.kinds.sglang.backend:SGLangBackend
acme = acme_engines:Acme
unfinished = acme_engines:Unfinished
picky = acme_engines:picky
number = acme_engines:number
lost = acme_engines:Lost
broken = acme_engines_that_are_not_there:Acme
twice = acme_engines:Acme
"""
URL = "http://127.0.0.1:9"


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    about = tmp_path / "acme_engines-1.0.dist-info"
    about.mkdir()
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "acme_engines.py").write_text(KINDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_engines", raising=False)
    own = Distribution.at(about).entry_points
    return [*own, EntryPoint("twice", "elsewhere:Other", GROUP)]


async def test_the_kind_of_a_plug_in_serves_next_to_the_built_in_ones(plugins: list[EntryPoint]) -> None:
    async with (
        ScriptedEngine(Counting(512)) as engine,
        ScriptedEngine(Counting(512)) as other,
        Pools(kinds=EngineKinds(plugins=plugins)) as pools,
    ):
        view = await pools.register(engine.url, kind="acme")
        assert (view.kind, view.state) == ("acme", "ready")
        handle = pools.handle(view.backend_id)
        assert handle is not None
        assert type(handle.backend).__name__ == "Acme"
        await pools.register(other.url)
        assert [each.kind for each in pools.views()] == ["acme", "sglang"]


async def test_an_unknown_kind_is_refused_with_the_known_ones_and_the_nearest(
    plugins: list[EntryPoint],
) -> None:
    with pytest.raises(InvalidFieldError, match="there is no kind of engine 'acmee'; did you mean acme") as caught:
        await EngineKinds(plugins=plugins).connect(URL, "one", "acmee")
    assert caught.value.hint.startswith("Known kinds: acme, broken, lost, ")
    assert [field.path for field in caught.value.fields] == ["kind"]
    assert "acme_engines" not in sys.modules


def test_code_that_is_newer_than_its_installation_says_what_to_do() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        EngineKinds(plugins=[]).check("sglang")
    assert caught.value.hint.startswith("Install rollout-service again")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "broken",
            r"\(acme_engines_that_are_not_there:Acme\) cannot be loaded: ModuleNotFoundError: No module",
        ),
        ("lost", r"\(acme_engines:Lost\) cannot be loaded: AttributeError: .*'Lost'"),
        ("number", r"\(acme_engines:number\) is not a kind of engine"),
        ("picky", r"makes no backend: TypeError: picky\(\) got an unexpected keyword argument 'backend_id'"),
        ("unfinished", "makes a backend that lacks abort, pause, resume, "),
        ("twice", "is declared more than once: acme_engines:Acme, elsewhere:Other"),
    ],
)
async def test_a_kind_that_cannot_be_used_is_named_and_stops_no_other(
    plugins: list[EntryPoint], kind: str, reason: str
) -> None:
    kinds = EngineKinds(plugins=plugins)
    with pytest.raises(ConfigurationError, match=f"'{kind}' {reason}"):
        await kinds.connect(URL, "one", kind)
    assert (await kinds.connect(URL, "two", "acme")).url == URL


def test_no_kind_is_imported_before_it_is_used() -> None:
    code = "import rollout_service.engines.pool.pools, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert not {f"rollout_service.engines.kinds.{kind}.backend" for kind in ("sglang", "vllm")} & modules
