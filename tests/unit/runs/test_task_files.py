"""A run reads the files that its creator may name, and what was checked is what is read."""

import json
import os
from pathlib import Path

import pytest
from pyarrow import parquet, table

from api_schemas.runs import FileTasks
from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.environments.dataset_files import MAX_INSTANCE_BYTES, read_instances
from rollout_service.runs.task_files import Rows, open_file


def opened(path: Path | str, *folders: Path) -> Rows:
    return open_file(FileTasks(path=str(path), environment="calc"), lambda _: None, folders)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a data folder beside a secret."""
    (tmp_path / "data/below").mkdir(parents=True)
    (tmp_path / "data/below/tasks.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    (tmp_path / "secret.jsonl").write_text('{"secret": 0}\n{"secret": 1}\n')
    (tmp_path / "data-too").mkdir()
    (tmp_path / "data-too/tasks.jsonl").write_text('{"secret": 2}\n')
    return tmp_path / "data"


def test_files_below_the_folders_are_read(data):
    (data / "link.jsonl").symlink_to("below/tasks.jsonl")
    (data.parent / "again").symlink_to(data)
    for path in (data / "below/tasks.jsonl", data / "below/../link.jsonl", data.parent / "again/link.jsonl"):
        for folder in (data, data.parent / "again"):
            assert opened(path, data.parent / "nowhere", folder).read(1) == {"n": 1}


OUTSIDE = [
    *(
        "../secret.jsonl",
        "../data-too/tasks.jsonl",
        "../none.jsonl",
        "{root}/secret.jsonl",
        "/etc/none.jsonl",
    ),
    *("link.jsonl", "dangling.jsonl", "loop.jsonl", "folder/secret.jsonl", "/dev/zero.jsonl"),
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_other_file_is_read_and_nothing_is_told_of_it(data, name):
    (data / "link.jsonl").symlink_to("../secret.jsonl")
    (data / "dangling.jsonl").symlink_to("../none.jsonl")
    (data / "loop.jsonl").symlink_to("../loop/x.jsonl")
    (data / "folder").symlink_to("..")
    path = data / name.replace("{root}", str(data.parent))
    for named, *folders in ([path, data], [path], [path, data / "below"], ["~/none.jsonl", data]):
        with pytest.raises(InvalidFieldError) as caught:
            opened(named, *folders)
        assert caught.value.fields[0].path == "body.source.path"
        assert caught.value.fields[0].message.endswith("is in none of the folders that runs may read")
        assert "data_dirs" in caught.value.hint


def test_without_folders_any_regular_file_is_read(data):
    source = FileTasks(path=str(data.parent / "secret.jsonl"), environment="calc")
    assert len(open_file(source, lambda _: None)) == 2
    os.mkfifo(data / "pipe.jsonl")
    with pytest.raises(InvalidFieldError, match="is not a regular file"):
        opened(data / "pipe.jsonl", data)
    with pytest.raises(InvalidFieldError, match=r"none\.jsonl: No such file"):
        opened(data / "none.jsonl", data)
    with pytest.raises(InvalidFieldError, match=r"neither \.jsonl"):
        opened("tasks.csv", data)


def test_a_path_that_changes_between_the_two_checks_is_refused(data, monkeypatch):
    path, real = data / "below/tasks.jsonl", os.open

    def replaced(found: Path, flags: int, *more: int) -> int:
        path.unlink()
        path.symlink_to(data.parent / "secret.jsonl")
        return real(found, flags, *more)

    monkeypatch.setattr(os, "open", replaced)
    with pytest.raises(InvalidFieldError, match="none of the folders"):
        opened(path, data)


ROWS = [{"n": "a\u2028b\u0085c"}, {"n": "b"}]


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"n": "a\\u2028b\\u0085c"}\n{"n": "b"}',
        b'{"n": "a\\u2028b\\u0085c"}\n\xef\xbb\xbf{"n": "b"}\n',
        '{"n": "a\u2028b\u0085c"}\r\n\r\n  \r\n{"n": "b"}\r\n'.encode(),
    ],
)
def test_byte_order_marks_line_ends_and_separators_change_no_row(data, content):
    (data / "odd.jsonl").write_bytes(content)
    rows = opened(data / "odd.jsonl", data)
    assert [rows.read(row) for row in range(len(rows))] == ROWS
    assert read_instances(data / "odd.jsonl") == ROWS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1, "score": NaN}', "column 'score' has NaN, or an infinite"),
        (b'{"a": 1, "score": [{"x": -Infinity}]}', "column 'score' has NaN, or an infinite"),
        (b'{"a": 1, "score": 1e999}', "column 'score' has NaN, or an infinite or too large number"),
        ('{"a": "\u00e9"}'.encode("latin-1"), "not in UTF-8: byte 8 is 0xe9"),
        ('{"a": "b"}'.encode("utf-16"), "not in UTF-8: byte 1 is 0xff"),
        (b'{"a": 1}x', "not JSON: trailing characters"),
        (b'{"a": "' + b"[" * 90_000, "not JSON: "),
        (b"[" * 90_000, "not JSON: "),
        (b"[1]", "not a JSON object"),
    ],
)
def test_a_row_that_cannot_be_stored_is_refused_with_its_cause(data, content, said):
    (data / "odd.jsonl").write_bytes(b'{"a": 1}\n' + content + b"\n")
    with pytest.raises(InvalidFieldError) as caught:
        opened(data / "odd.jsonl", data)
    with pytest.raises(ConfigurationError) as of_environment:
        read_instances(data / "odd.jsonl")
    assert f"odd.jsonl, line 2: {said}" in str(caught.value)
    assert f"odd.jsonl:2: {said}" in str(of_environment.value)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_row_that_every_sample_would_copy_has_a_bound(data, suffix):
    path, size = data / f"large{suffix}", MAX_INSTANCE_BYTES
    for length, fits in ((size - 100, True), (size, False), (3 * size, False)):
        path.write_text(json.dumps({"n": "x" * length}) + "\n")
        if suffix == ".parquet":
            parquet.write_table(table({"n": ["x" * length]}), path)
        if fits:
            assert len(opened(path, data)) == 1
            continue
        with pytest.raises(InvalidFieldError, match=r"an instance of over 8\.4 MB, of which"):
            opened(path, data)
        if suffix == ".jsonl":
            with pytest.raises(ConfigurationError, match=r"large\.jsonl:1: an instance of"):
                read_instances(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_that_is_replaced_later_stays_the_one_that_was_checked(data, suffix):
    path = data / f"mine{suffix}"
    path.write_text('{"n": 0}\n{"n": 1}\n')
    if suffix == ".parquet":
        parquet.write_table(table({"n": [0, 1]}), path)
    rows = opened(path, data)
    path.unlink()
    path.symlink_to(data.parent / "secret.jsonl")
    assert [rows.read(row) for row in (1, 0)] == [{"n": 1}, {"n": 0}]


def test_a_file_is_held_open_only_as_long_as_its_rows(data):
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = descriptors()
    rows = opened(data / "below/tasks.jsonl", data)
    assert descriptors() == before + 1
    del rows
    assert descriptors() == before
