"""Programs that use the package `e2b_code_interpreter`, unchanged, run code in sandboxes of this service."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import e2b
import httpx
import pytest
from e2b_code_interpreter import Execution, Sandbox

from tests.support.e2b_service import KEY, e2b_service, options, point_programs_at

pytestmark = [pytest.mark.apptainer, pytest.mark.slow, pytest.mark.xdist_group("code interpreter")]


SLOW = """
import time
open("/tmp/begun", "w").close()
time.sleep(4)
"done"
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with e2b_service(tmp_path_factory.mktemp("code")) as (_, found):
        yield found


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    point_programs_at(url, monkeypatch)


@pytest.fixture(scope="module")
def shared(url: str) -> Iterator[Sandbox]:
    """A sandbox of the template that programs name if they choose none."""
    with Sandbox.create(envs={"GIVEN": "x y"}, **options(url)) as sandbox:
        yield sandbox


def printed(run: Execution) -> str:
    """Join the pieces, of which a single `print` may give two."""
    return "".join(run.logs.stdout)


def test_state_lives_from_run_to_run(shared):
    first = shared.run_code("import os\nx = 41\nprint('begun', os.environ['GIVEN'])\nx")
    assert (printed(first), first.text, first.error) == ("begun x y\n", "41", None)
    second = shared.run_code("x + 1")
    assert (second.logs.stdout, second.text) == ([], "42")
    assert second.execution_count == first.execution_count + 1
    assert shared.run_code("'a' + 'b'").text == "ab"
    assert shared.run_code("x = 1").results == []
    shared.files.write("data.txt", "of the sandbox")
    assert shared.run_code("open('data.txt').read()").text == "of the sandbox"


def test_callbacks_are_called(shared):
    seen: list[object] = []
    shared.run_code(
        "print(1, end='')\n2/0",
        on_stdout=lambda one: seen.append(one.line),
        on_error=lambda one: seen.append(one.name),
    )
    assert (seen[0], seen[-1]) == ("1", "ZeroDivisionError")


RICH = """
from IPython.display import display
class Rich:
    def _repr_html_(self): return "<b>1</b>"
    def _repr_png_(self): return b"picture"
    def _repr_mimebundle_(self, **_): return {"application/x+json": [1], "text/latex": "$1$"}
    def _repr_json_(self): return {"a": float("inf"), "b": {"c": []}}
    def __repr__(self): return "'rich'"
"""


def test_values_and_displays_come_in_their_formats(shared):
    seen = []
    shared.run_code(RICH)
    done = shared.run_code("display(Rich()); display('shown'); Rich()", on_result=seen.append)
    assert [one.is_main_result for one in done.results] == [False, False, True]
    assert [one.text for one in seen] == ["rich", "shown", "rich"]
    for one in (done.results[0], done.results[2]):
        assert (one.html, one.png, one.latex) == ("<b>1</b>", "cGljdHVyZQ==", "$1$")
        assert (one.json, one.extra) == ({"a": "inf", "b": {"c": []}}, {"application/x+json": [1]})
    assert done.text == "rich"
    assert done.logs.stdout == []


@pytest.mark.parametrize(
    "formats",
    [
        "{'application/json': 10**40}",
        "{'application/json': __import__('functools').reduce(lambda a, _: [a], range(900), 1)}",
        "{'image/png': 'not Base64', 'text/plain': ['no', 'text']}",
        "{f'x/{n}': 'x' for n in range(9999)}",
        "{'text/html': 'x' * 50_000_000}",
    ],
)
def test_formats_that_nobody_expects_are_left_out(shared, formats):
    done = shared.run_code(f"from IPython.display import display; display({formats}, raw=True); 'on'")
    assert done.text == "on"
    assert len(str(vars(done.results[0]))) < 1_000


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import os, time\nprint(1)\nwhile not os.path.exists('/tmp/python'): time.sleep(0.01)"),
        ("bash", "echo 1; until [ -e /tmp/bash ]; do sleep 0.01; done"),
    ],
)
def test_output_comes_while_code_runs(shared, language, code):
    shared.run_code(code, language=language, timeout=30, on_stdout=lambda _: shared.files.write(f"/tmp/{language}", ""))


def test_the_streams_are_apart(shared):
    code = "import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.system('echo more >&2')"
    logs = shared.run_code(code).logs
    assert ("".join(logs.stdout), "".join(logs.stderr)) == ("out\n", "err\nmore\n")


def test_output_without_end_is_cut(shared):
    logs = shared.run_code("for _ in range(100): print('x' * 200_000)").logs
    assert len("".join(logs.stdout)) < 9_000_000
    assert "left out" in logs.stdout[-1]


def test_variables_of_a_run_are_its_own(shared):
    shared.run_code("import os")
    for language, show in (("python", "print(os.environ.get('GIVEN'))"), ("bash", "echo ${GIVEN-None}")):
        runs = [shared.run_code(show, language=language, envs=envs) for envs in ({"GIVEN": "a 'b'"}, None)]
        assert [printed(run) for run in runs] == ["a 'b'\n", "x y\n"]


def test_an_exception_is_an_error_of_the_run(shared):
    error = shared.run_code("def f(): raise KeyError('k')\nf()").error
    assert (error.name, error.value) == ("KeyError", "'k'")
    assert "in f()" in error.traceback or "f()" in error.traceback
    assert shared.run_code("1").text == "1"


def test_a_kernel_that_dies_is_an_error_and_the_next_run_has_another(shared):
    error = shared.run_code("print('so far', flush=True)\nimport os; os.kill(os.getpid(), 9)").error
    assert error.name == "SessionDiedError"
    assert shared.run_code("'x' in globals()").text == "False"


def test_bash_is_a_language_with_a_state_of_its_own(shared):
    assert printed(shared.run_code("cd /tmp; here=1; echo $GIVEN", language="bash")) == "x y\n"
    assert printed(shared.run_code("pwd; echo $here", language="Bash")) == "/tmp\n1\n"
    assert shared.run_code("exit_with() { return 3; }; exit_with", language="bash").error.value == "3"


@pytest.mark.parametrize("does", ["", "print(1)", "display('y' * 10_000)"])
def test_a_run_that_is_late_is_interrupted_and_the_state_kept(shared, does):
    shared.run_code("from IPython.display import display; kept = 'here'")
    began = time.monotonic()
    with pytest.raises(e2b.TimeoutException):
        shared.run_code(f"import time\nfor _ in range(600): time.sleep(0.1); {does}", timeout=1)
    assert shared.run_code("kept").text == "here"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("language", ["python", "bash"])
def test_code_goes_on_for_as_long_as_its_sandbox_is_renewed(url, language):
    code = {
        "python": "import time; open('/tmp/begun', 'w'); time.sleep(6); 'done'",
        "bash": "touch /tmp/begun; sleep 6; echo done",
    }
    with Sandbox.create(timeout=60, **options(url)) as sandbox, ThreadPoolExecutor(1) as threads:
        sandbox.run_code("true" if language == "bash" else "True", language=language)  # its start takes long
        sandbox.set_timeout(5)
        run = threads.submit(sandbox.run_code, code[language], language=language)
        while not sandbox.files.exists("/tmp/begun"):
            assert not run.done()
        sandbox.set_timeout(60)
        done = run.result(30)
    assert done.text == "done" or printed(done) == "done\n"


def test_a_client_that_gives_up_waiting_stops_no_other(shared):
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(shared.run_code, SLOW)
        while not shared.files.exists("/tmp/begun"):
            assert not slow.done()
        with pytest.raises(e2b.TimeoutException):
            shared.run_code("ran = True", timeout=1)
        assert slow.result(30).text == "done"
    assert shared.run_code("'ran' in globals()").text == "False"


def test_a_sandbox_that_ends_ends_its_runs(url):
    sandbox = Sandbox.create(**options(url))
    with ThreadPoolExecutor(2) as threads:
        runs = [
            threads.submit(sandbox.run_code, SLOW.replace("4", "60")),
            threads.submit(sandbox.run_code, "touch /tmp/bash; sleep 60", language="bash"),
        ]
        while not (sandbox.files.exists("/tmp/begun") and sandbox.files.exists("/tmp/bash")):
            assert not any(run.done() for run in runs)
        sandbox.kill()
        for run in runs:
            with pytest.raises(e2b.TimeoutException):
                run.result(20)


def test_each_language_has_a_context(shared):
    contexts = {one.id: one for one in shared.list_code_contexts()}
    assert {name: (one.language, one.cwd) for name, one in contexts.items()} == {
        "python": ("python", "/workspace"),
        "bash": ("bash", "/workspace"),
    }
    shared.run_code("y = 1", context=contexts["python"])
    assert shared.run_code("y").text == "1"
    shared.restart_code_context(contexts["python"])
    assert shared.run_code("'y' in globals()").text == "False"
    with pytest.raises(e2b.SandboxException, match="Restart it"):
        shared.remove_code_context("python")


def test_contexts_have_states_of_their_own_until_they_are_removed(url):
    with Sandbox.create(**options(url)) as sandbox:
        sandbox.files.make_dir("deep")
        one = sandbox.create_code_context(cwd="/workspace/deep")
        two = sandbox.create_code_context(cwd="deep", language="bash")
        assert [(it.language, it.cwd) for it in (one, two)] == [(it, "/workspace/deep") for it in ("python", "bash")]
        sandbox.run_code("import os; x = 0")
        assert sandbox.run_code("import os; x = 1; os.getcwd()", context=one).text == "/workspace/deep"
        assert printed(sandbox.run_code("pwd; x=1", context=two)) == "/workspace/deep\n"
        assert [sandbox.run_code("x").text, sandbox.run_code("x", context=one).text] == ["0", "1"]
        sandbox.restart_code_context(one)
        assert sandbox.run_code("'x' in globals()", context=one).text == "False"
        assert [it.id for it in sandbox.list_code_contexts()] == ["python", "bash", one.id, two.id]
        with ThreadPoolExecutor(1) as threads:
            run = threads.submit(sandbox.run_code, SLOW.replace("4", "60"), context=one)
            while not sandbox.files.exists("/tmp/begun"):
                assert not run.done()
            sandbox.remove_code_context(one)
            assert run.result(20).error.name == "SessionDiedError"
        sandbox.remove_code_context(two.id)
        for removed in (one, two):
            with pytest.raises(e2b.NotFoundException, match="no context"):
                sandbox.run_code("1", context=removed)
        for _ in range(8):
            sandbox.create_code_context(language="bash")
        with pytest.raises(e2b.SandboxException, match="at most 10 contexts"):
            sandbox.create_code_context()
        assert sandbox.run_code("x").text == "0"


def test_a_kernel_that_dies_between_runs_ends_no_sandbox(url):
    with Sandbox.create(**options(url)) as sandbox:
        pid = sandbox.run_code("import os; os.getpid()").text
        sandbox.commands.run(f"kill -9 {pid}; while [ -e /proc/{pid} ]; do sleep 0.01; done; sleep 2")
        assert sandbox.run_code("1").error.name == "SessionDiedError"
        assert sandbox.run_code("1").text == "1"


def test_what_is_not_served_is_refused(shared):
    with pytest.raises(e2b.NotFoundException, match="no context or language 'r'"):
        shared.run_code("1", language="r")
    with pytest.raises(e2b.NotFoundException, match="no context or language 'other'"):
        shared.restart_code_context("other")
    with pytest.raises(e2b.NotFoundException, match="no context or language 'r'"):
        shared.create_code_context(language="r")
    with pytest.raises(e2b.SandboxException, match=r"env_vars\.a b"):
        shared.run_code("1", envs={"a b": "c"})


def test_no_code_runs_without_the_token(shared, url):
    headers = {"E2b-Sandbox-Id": shared.sandbox_id, "E2b-Sandbox-Port": "49999"}
    for more in ({}, {"X-Access-Token": "x"}, {"E2B-Traffic-Access-Token": "x"}, {"X-API-KEY": KEY}):
        for method, path in [
            ("POST", "/execute"),
            ("GET", "/contexts"),
            ("POST", "/contexts/python/restart"),
        ]:
            answer = httpx.request(method, url + path, headers=headers | more, json={"code": "1"})
            assert answer.status_code == 401
