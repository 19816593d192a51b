import pytest

from tests.support.tokens.chat_formats import FAMILIES, shared


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("formats")


@pytest.fixture(params=FAMILIES)
def chat(request, root):
    return shared(root / request.param, request.param)
