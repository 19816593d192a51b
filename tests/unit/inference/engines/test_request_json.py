"""A prompt becomes the same JSON in whatever form its ids are held."""

from array import array

import orjson
import pytest

from rollout_service.engines.kinds.http_backend import dump_request, prompt_for_json

IDS = [0, 7, 151_935, 2**31 - 1]


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("i", ids), lambda ids: array("q", ids)])
def test_a_prompt_is_the_same_json_in_every_form(kind):
    body = dump_request({"input_ids": prompt_for_json(kind(IDS)), "stream": False})
    assert body == orjson.dumps({"input_ids": IDS, "stream": False})
