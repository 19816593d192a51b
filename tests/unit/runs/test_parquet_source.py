"""Tasks are read from real Parquet files with every column type, or an error names the row at fault."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from pydantic import JsonValue

from api_schemas.runs import FileTasks
from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.builtin.calc import environment
from rollout_service.runs.dataset import SourceChangedError, reopening
from rollout_service.runs.task_files import Rows, open_file


def source(path: Path) -> FileTasks:
    return FileTasks(path=str(path), environment="calc")


def write(path: Path, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=700)
    return path


def anything(_: dict[str, JsonValue]) -> None:
    pass


def opened(path: Path) -> Rows:
    return open_file(source(path), anything)


def test_types_and_nested_columns(tmp_path):
    point = pyarrow.struct([("x", pyarrow.int8()), ("names", pyarrow.list_(pyarrow.string()))])
    path = write(
        tmp_path / "all.parquet",
        text=pyarrow.array(["é", "b"]).dictionary_encode(),
        big=pyarrow.array([2**62, -1], pyarrow.int64()),
        half=[0.5, -0.25],
        yes=[True, None],
        point=pyarrow.array([{"x": 1, "names": ["n", None]}, None], point),
        lists=[[[1], []], []],
        when=pyarrow.array([datetime.datetime(2025, 1, 2, 3, 4, 5), None]),
        day=[datetime.date(2025, 1, 2), None],
        money=[Decimal("1.50"), None],
        pairs=pyarrow.array([[("k", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    )
    rows = opened(path)
    assert len(rows) == 2
    assert rows.read(0) == {
        "text": "é",
        "big": 2**62,
        "half": 0.5,
        "yes": True,
        "point": {"x": 1, "names": ["n", None]},
        "lists": [[1], []],
        "when": "2025-01-02T03:04:05",
        "day": "2025-01-02",
        "money": "1.50",
        "pairs": [["k", 1]],
    }
    assert rows.read(1)["point"] is None


def test_rows_beyond_one_group_are_read_by_position(tmp_path):
    path = write(tmp_path / "many.parquet", n=list(range(3_000)))
    rows = opened(path)
    assert [rows.read(n) for n in (0, 699, 700, 1_024, 2_999)] == [{"n": n} for n in (0, 699, 700, 1_024, 2_999)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([b"a"], "column 'value': an instance cannot contain bytes"),
        ([[{"x": b"a"}]], "column 'value': an instance cannot contain bytes"),
        ([float("nan")], "column 'value' has NaN, or an infinite"),
        ([datetime.timedelta(1)], "column 'value': an instance cannot contain timedelta"),
    ],
)
def test_values_that_json_cannot_represent_are_named(tmp_path, values, said):
    with pytest.raises(InvalidFieldError, match=f"row 1.*{said}"):
        opened(write(tmp_path / "odd.parquet", good=["a"], value=values))


def test_a_row_that_the_environment_refuses_is_named(tmp_path):
    answers = ["4"] * 1_500 + ["four"] + ["4"]
    path = write(tmp_path / "calc.parquet", question=["2 + 2"] * len(answers), answer=answers)
    with pytest.raises(InvalidFieldError, match=r"row 1501.*answer") as caught:
        open_file(source(path), environment.check)
    assert [field.path for field in caught.value.fields] == ["body.source.path"]


def test_files_without_instances_are_refused(tmp_path):
    path = tmp_path / "cut.parquet"
    for data in (b"", b"PAR1", write(tmp_path / "whole.parquet", n=[1]).read_bytes()[:-9]):
        path.write_bytes(data)
        with pytest.raises(InvalidFieldError, match="not a whole Parquet file"):
            opened(path)
    with pytest.raises(InvalidFieldError, match="contains no instances"):
        opened(write(tmp_path / "empty.parquet", n=pyarrow.array([], pyarrow.int64())))


def test_a_file_that_was_changed_is_refused(tmp_path):
    path = write(tmp_path / "tasks.parquet", n=[1, 2])
    digest = opened(path).digest
    reopen = reopening({}.__getitem__)
    assert reopen(source(path), digest).read(1) == {"n": 2}
    write(path, n=[1, 3])
    with pytest.raises(SourceChangedError):
        reopen(source(path), digest)
    path.write_bytes(b"PAR1")
    with pytest.raises(SourceChangedError, match="cannot be read again"):
        reopen(source(path), digest)
