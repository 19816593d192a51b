"""Every mistake in `environment.toml` is found when it is read, and reported in a way that helps."""

import json

import pytest
from pydantic import BaseModel, model_validator

from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.environments.dataset_files import count_splits
from rollout_service.environments.declarative.declaration import read_declaration, read_table
from rollout_service.environments.declarative.environment import DeclarativeEnvironment, load_folder
from rollout_service.environments.registry import load_declared

MINIMAL = 'name = "e"\nimage = "base"\n[evaluate]\ncommand = "true"\n'


def write(folder, text=MINIMAL, **files):
    (folder / "environment.toml").write_text(text)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("name = ", ["here is not valid TOML"]),
        pytest.param("name = " + "[" * 5_000, ["here is not valid TOML"], id="deep"),
        pytest.param("name = " + "1" * 5_000, ["here is not valid TOML"], id="long"),
        ('name = "e"\nimage = "base"\n', ["here: the key evaluate is missing"]),
        (MINIMAL.replace("command", "comand"), ["there is no key evaluate.comand; did you mean command?"]),
        ("promt = 'x'\n" + MINIMAL, ["there is no key promt; did you mean prompt?"]),
        (MINIMAL + "[limits]\nmax_turn = 3\n", ["limits.max_turn; did you mean max_turn"]),
        (MINIMAL + "[limits]\nmax_turns = 0\n", ["limits.max_turns: Input should be greater"]),
        (MINIMAL + "[sandbox]\nmemory = '2 GB'\n", ["sandbox.memory: "]),
        (MINIMAL + "[sandbox]\nnetwork = 'lan'\n", ['sandbox.network: give "none", "full", or']),
        (MINIMAL + "[sandbox]\nnetwork = [1]\n", ["sandbox.network: "]),
        (MINIMAL + "[sandbox]\nnetwork = ['a.b', 'c.d/e']\n", ["sandbox.network: ", "invalid entry 'c.d/e'"]),
        (
            MINIMAL + "[init]\nfile = []\n",
            ["there is no key init.file; did you mean files?", "init.command is missing"],
        ),
        (MINIMAL.replace('"true"', '"true"\nsandbox = "other"'), ["evaluate.sandbox: "]),
        (MINIMAL.replace('"e"', '"a b"'), ["here: name: "]),
    ],
)
def test_mistakes_are_named_with_their_place(text, messages):
    with pytest.raises(ConfigurationError) as caught:
        read_declaration(text, where="here")
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (MINIMAL + "[init]\nfile = []\n", "[init] takes command, each, files, secrets, shared."),
        ("", "The file takes dataset, description, "),
        (MINIMAL.replace("command", "comand"), "[evaluate] takes agent_processes, artifacts, "),
        (MINIMAL + "[limits]\nmax_turns = 0\n", "docs/reference/environment-toml.md says"),
        (MINIMAL + '[[mcp]]\nname = "a"\ncomand = ["x"]\n', "[[mcp]] takes call_seconds, command, env"),
    ],
)
def test_the_hint_lists_the_known_keys_or_names_the_page(text, hint):
    with pytest.raises(ConfigurationError) as caught:
        read_declaration(text, where="here")
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'tools = ["bsh"]\n' + MINIMAL,
            "environment 'e': there is no built-in tool 'bsh'; did you mean bash",
        ),
        (
            MINIMAL + "[sandbox]\ngpus = 1\n",
            "there is no key sandbox.gpus: sandboxes have no GPU. Let a service",
        ),
        ('prompt = "{{ instance.a "\n' + MINIMAL, "prompt of 'e', line 1 is not a valid template"),
        ('prompt = "{{ question }}"\n' + MINIMAL, "uses question, but a template has only `instance`"),
        (MINIMAL.replace('"base"', '"other.sif"'), "there is no image"),
        (MINIMAL.replace('"true"', '"true"\nartifacts = ["workspace"]'), "is not an absolute path"),
        (MINIMAL.replace('"true"', '"true"\nartifacts = ["/a/../etc"]'), "is not an absolute path"),
        (
            MINIMAL + '[init]\ncommand = "/environment/init"\n',
            "the init command needs init, which the folder lacks",
        ),
        (MINIMAL + '[[mcp]]\nname = "a"\ncomand = ["x"]\n', "there is no key mcp.0.comand; did you mean command?"),
        (MINIMAL + '[[mcp]]\ncommand = ["x"]\n', "the key mcp.0.name is missing"),
        (MINIMAL + '[[mcp]]\nname = "a"\n', "mcp.0: give either `command` or `url`"),
        (
            MINIMAL + '[[mcp]]\nname = "a"\nurl = "https://mcp.example.com/mcp"\n',
            "the server 'a' cannot be reached: the sandbox has no network",
        ),
        (MINIMAL + 2 * '[[mcp]]\nname = "a"\ncommand = ["x"]\n', "two servers are named 'a'"),
        (MINIMAL + '[dataset]\npath = "none.jsonl"\n', "cannot be read"),
        (MINIMAL + '[dataset]\npath = "bad.jsonl"\n', "bad.jsonl:2: not JSON: "),
        (MINIMAL + '[dataset]\npath = "list.jsonl"\n', "list.jsonl:1: not a JSON object"),
    ],
)
def test_a_mismatch_with_the_folder_is_found_too(tmp_path, text, message):
    write(tmp_path, text, bad__jsonl='{"a": 1}\n{\n', list__jsonl="[1]\n")
    with pytest.raises(ConfigurationError) as caught:
        load_folder(tmp_path)
    assert message in str(caught.value)


def test_an_image_next_to_the_file_is_found(tmp_path):
    write(tmp_path, MINIMAL.replace('"base"', '"own.sif"'), own__sif="image")
    assert load_folder(tmp_path).spec.image == str(tmp_path / "own.sif")


def test_an_image_that_holds_the_folder_hides_it(tmp_path):
    environment = load_folder(write(tmp_path, some__sif="image"), image=tmp_path / "some.sif")
    assert environment.spec.image == str(tmp_path / "some.sif")
    assert list(environment.spec.binds) == ["/environment"]
    assert "binds" not in environment.spec.model_dump()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[dataset]\npath = "{outside}"\n', "dataset: {outside} is not a file in /environment"),
        ('[dataset.splits]\ntrain = "own.jsonl"\ntest = "../outside.jsonl"\n', "outside.jsonl is not a file"),
        ('[search]\nurl = "http://127.0.0.1:8000/v1/rollouts"\n', "search: an image cannot name addresses"),
        ("", "`system`, line 1, uses `mul`"),
    ],
)
def test_an_environment_in_an_image_names_nothing_of_the_host(tmp_path, text, message):
    outside = tmp_path / "outside.jsonl"
    outside.write_text("{}\n")
    (tmp_path / "inside").mkdir()
    text = text.replace("{outside}", str(outside))
    system = "" if text else "system = \"{{ 'a' * 10 ** 10 }}\"\n"
    folder = write(tmp_path / "inside", system + MINIMAL + text, own__jsonl="{}\n")
    with pytest.raises(ConfigurationError, match=r"some\.sif:/environment") as caught:
        load_folder(folder, image=tmp_path / "some.sif")
    assert message.replace("{outside}", str(outside)) in str(caught.value)


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_instance_with_an_empty_prompt_is_refused(tmp_path, question):
    environment = load_folder(write(tmp_path, 'system = "You answer."\n' + MINIMAL))
    with pytest.raises(InvalidFieldError, match="makes the prompt of 'e' empty") as caught:
        environment.check({"question": question})
    assert [field.path for field in caught.value.fields] == ["instance"]


def test_the_dataset_is_read_and_its_instances_checked(tmp_path):
    text = 'prompt = "{{ instance.word }}"\n' + MINIMAL + '[dataset]\npath = "d.jsonl"\n'
    environment = load_folder(write(tmp_path, text, d__jsonl='{"word": "a"}\n\n{"text": "b"}\n'))
    assert isinstance(environment, DeclarativeEnvironment)
    good, bad = environment.dataset()
    environment.check(good)
    with pytest.raises(InvalidFieldError, match=r"instance\.word: is missing"):
        environment.check(bad)


def test_files_that_are_too_large_belong_into_the_image(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_service.environments.declarative.files.MAX_BYTES", 1_000)
    with pytest.raises(ConfigurationError, match="exceed 1000 bytes"):
        load_folder(write(tmp_path, data="x" * 2_000))


def test_a_data_set_may_have_a_file_for_each_split(tmp_path):
    text = MINIMAL + '[dataset.splits]\ntrain = "train.jsonl"\nheld_out = "test.jsonl"\n'
    write(
        tmp_path,
        text,
        train__jsonl='{"question": "a\u2028b"}\n',
        test__jsonl='{"question": "c", "split": "held_out"}\n',
    )
    environment = load_folder(tmp_path)
    assert environment.dataset() == [
        {"question": "a\u2028b", "split": "train"},
        {"question": "c", "split": "held_out"},
    ]
    assert count_splits(environment.dataset()) == {"train": 1, "held_out": 1}
    (tmp_path / "train.jsonl").write_text('{"question": "a", "split": "held_out"}')
    with pytest.raises(ConfigurationError, match=r"train\.jsonl:1 says that its split is 'held_out'"):
        load_folder(tmp_path)


@pytest.mark.parametrize("table", ['path = "a"\nsplits = {train = "b"}\n', ""])
def test_a_data_set_is_one_file_or_several(table):
    with pytest.raises(ConfigurationError, match="dataset: give either `path` or `splits`"):
        read_declaration(f"{MINIMAL}[dataset]\n{table}", where="here")


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("bash /environment/grade.sh", []),
        ("/environment/run", []),
        ("cd /tmp && MODE=x /environment/run | tee log", []),
        ("python3 /environment/lib/check.py --all", []),
        ("ls /environment/lib /environment", []),
        ("echo x > /environment/made; cat /environment/made", []),
        ("bash /environment/grad.sh", ["[evaluate] command: /environment/grad.sh does not exist"]),
        (
            "python3 '/environment/lib/chek.py'",
            ["[evaluate] command: /environment/lib/chek.py does not exist"],
        ),
        ("/environment/grade.sh", ["/environment/grade.sh is not executable: chmod +x grade.sh"]),
        ("true; /environment/grade.sh", ["/environment/grade.sh is not executable"]),
        ("/environment/dos", ["/environment/dos has Windows line endings"]),
    ],
)
def test_a_script_that_cannot_be_run_is_found(tmp_path, command, found):
    write(tmp_path, MINIMAL.replace('"true"', json.dumps(command)), grade__sh="true")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "check.py").write_text("")
    for name, text in (("run", "#!/bin/sh\n"), ("dos", "#!/bin/sh\r\n")):
        (tmp_path / name).write_bytes(text.encode())
        (tmp_path / name).chmod(0o755)
    findings = load_folder(tmp_path).findings()
    assert len(findings) == len(found)
    for finding, text in zip(findings, found, strict=True):
        assert text in finding


def test_a_shared_command_that_writes_what_no_other_sandbox_sees_is_found(tmp_path):
    init = """
[init]
command = "echo 127.0.0.1 db >>/etc/hosts; cp a /srv; echo 1 > /dev/shm/x"
shared = true
each = "echo 127.0.0.1 db >>/etc/hosts"
"""
    write(tmp_path, MINIMAL + init)
    found = load_folder(tmp_path).findings()
    assert [line.split(",")[0] for line in found] == [
        "[init] command writes to /dev/shm/x",
        "[init] command writes to /etc/hosts",
    ]
    write(tmp_path, MINIMAL + '[init]\ncommand = "echo 127.0.0.1 db >>/etc/hosts"\n')
    assert load_folder(tmp_path).findings() == []


@pytest.mark.parametrize(
    "head",
    [
        MINIMAL,
        'kind = "swe"\nname = "e"\n',
        'kind = "openenv"\nname = "e"\nurl = "http://localhost:1"\n',
        'kind = "game"\nname = "e"\nimage = "base"\ncommand = "true"\n',
    ],
)
def test_each_file_of_a_data_set_without_an_instance_is_found(tmp_path, head):
    write(tmp_path, f'{head}[dataset]\npath = "tasks.jsonl"\n', tasks__jsonl="\n")
    assert load_declared(tmp_path).findings() == [f"[dataset]: {tmp_path}/tasks.jsonl has no instances"]
    text = f'{head}[dataset.splits]\ntrain = "tasks.jsonl"\nheld_out = "more.jsonl"\n'
    write(tmp_path, text, tasks__jsonl='{"question": "a"}\n', more__jsonl="")
    assert load_declared(tmp_path).findings() == [f"[dataset]: {tmp_path}/more.jsonl has no instances"]


@pytest.mark.parametrize(("key", "warned"), [("", 0), ('image = "whatever"\n', 1)])
def test_an_image_that_is_an_environment_needs_no_key_image(tmp_path, key, warned):
    image = tmp_path / "mine.sif"
    image.touch()
    folder = tmp_path / "environment"
    folder.mkdir()
    environment = load_folder(write(folder, MINIMAL.replace('image = "base"\n', key)), image=image)
    assert environment.spec.image == str(image)
    assert len(environment.warnings()) == warned
    assert all("'whatever'" in warning for warning in environment.warnings())


def test_a_server_elsewhere_makes_an_environment_not_replayable(tmp_path):
    (tmp_path / "environment.toml").write_text(
        'name = "e"\nimage = "base"\nprompt = "?"\n[sandbox]\nnetwork = ["mcp.example.com"]\n'
        '[[mcp]]\nname = "far"\nurl = "https://mcp.example.com/mcp"\nheaders = { authorization = "Bearer secret" }\n'
        '[evaluate]\ncommand = "true"\n'
    )
    environment = load_folder(tmp_path)
    assert environment.replayable == "never"
    shown = environment.spec.model_dump_json()
    assert '"mcp":["far"]' in shown
    assert "secret" not in shown


def test_keys_that_contradict_each_other_are_told_without_a_path():
    class Either(BaseModel):
        @model_validator(mode="before")
        @classmethod
        def _refuse(cls, table):
            raise ValueError("give either")

    with pytest.raises(ConfigurationError, match=r"^here: give either$"):
        read_table(Either, {}, where="here")


@pytest.mark.parametrize("keys", ["", 'sandbox = "same"\n[evaluate.run]\ncommand = "true"\n'], ids=["fresh", "run"])
def test_processes_can_be_kept_only_where_they_are(keys):
    kept = MINIMAL + 'agent_processes = "keep"\n'
    assert read_declaration(kept + 'sandbox = "same"\n', where="here").evaluate.agent_processes == "keep"
    with pytest.raises(ConfigurationError, match=r'evaluate: .*agent_processes = "keep" needs sandbox = "same"'):
        read_declaration(kept + keys, where="here")
