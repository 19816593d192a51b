"""Problems in a document are named by path, with the nearest known field at that place."""

import pytest
from pydantic import ValidationError

from api_schemas.runs import RunRequest
from rollout_service.base.validation import describe_problems

SOURCE = {"kind": "file", "path": "/x.jsonl", "environment": "calc"}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"group_sise": 8}, "group_sise: unknown field; did you mean group_size?"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature: unknown field; did you mean temperature?"),
        ({"source": SOURCE | {"shufle": True}}, "source.file.shufle: unknown field; did you mean shuffle?"),
        ({"filters": [{"nam": "x"}]}, "filters.0.nam: unknown field; did you mean name?"),
        ({"zzz": 1}, "zzz: unknown field"),
        ({"min_usable": 9, "group_size": 2}, "min_usable may not exceed group_size"),
    ],
)
def test_a_problem_names_the_path_and_the_nearest_field(document, said):
    with pytest.raises(ValidationError) as caught:
        RunRequest.model_validate({"source": SOURCE, "batch_size": 1} | document)
    assert said in describe_problems(caught.value, RunRequest)


def test_invalid_json_is_reported():
    with pytest.raises(ValidationError) as caught:
        RunRequest.model_validate_json("{")
    assert describe_problems(caught.value, RunRequest)[0].startswith("not valid JSON: ")
