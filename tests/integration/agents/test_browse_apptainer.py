"""Pages come through the sandbox's list of hosts, from the sandbox's own loopback, and from nowhere else."""

import pytest

from rollout_service.agents.tool_calling.builtin_tools import BUILTIN_TOOLS
from rollout_service.agents.tool_calling.tools import ToolContext, by_name
from rollout_service.agents.turns import ToolInputError
from sandboxes import ApptainerConfig, SandboxSpec, make_provider
from tests.support.web_server import web_server

pytestmark = pytest.mark.apptainer
BROWSE = by_name(BUILTIN_TOOLS)["browse"]
SERVE = "cd /tmp && echo inside >page.txt && exec python3 -u -m http.server --bind 127.0.0.1 8123"


@pytest.fixture
async def provider(tmp_path):
    provider = make_provider(ApptainerConfig(), tmp_path)
    yield provider
    await provider.close()


async def read(sandbox, url):
    return (await BROWSE({"url": url}, ToolContext(sandbox, 30.0, 4_000))).text


async def test_the_list_of_hosts_decides(provider):
    with (
        web_server(lambda path, body: (200, {"content-type": "text/plain"}, path.encode())) as listed,
        web_server(lambda path, body: (200, {}, b"unlisted")) as unlisted,
    ):
        async with await provider.start(SandboxSpec(network=(listed,))) as sandbox:
            assert await read(sandbox, f"http://{listed}/a?b=c") == "/a?b=c"
            with pytest.raises(ToolInputError, match="refused"):
                await read(sandbox, f"http://{unlisted}/")  # nothing listens there inside
            with pytest.raises(ToolInputError, match=r"host example\.net is not in the"):
                await read(sandbox, "https://example.net/")
            assert "host example.net is not in" in await read(sandbox, "http://example.net/")
            counts = await provider.egress_counts()
            assert (counts.allowed, counts.refused) == (1, {"host": 2})


async def test_a_server_inside_is_read_without_a_network(provider):
    with web_server(lambda path, body: (200, {}, b"the host's")) as address:
        async with await provider.start(SandboxSpec()) as sandbox:
            async with sandbox.program(["bash", "-c", SERVE]) as server:
                assert b"8123" in await server.receive()
                assert await read(sandbox, "http://localhost:8123/page.txt") == "inside"
            with pytest.raises(ToolInputError, match="refused"):
                await read(sandbox, f"http://{address}/")
            with pytest.raises(ToolInputError, match="has no network"):
                await read(sandbox, "http://192.0.2.1/")
