"""A server of the Model Context Protocol on the standard library alone: run it as a program, or call `answer`.

As hostile servers may, it prints lines that are no messages, asks its client for things, and lists its tools in pages.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
OTHERS = ("picture", "fail", "sleep", "die", "where", "long", "odd.name")
TOOLS = [
    {"name": "add", "description": "Add two numbers.", "inputSchema": SCHEMA},
    *({"name": name, "inputSchema": NOTHING} for name in OTHERS),
]


def answer(asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a message; None for a notification."""
    if "id" not in asked:
        return None
    try:
        return {
            "jsonrpc": "2.0",
            "id": asked["id"],
            "result": result(asked["method"], asked.get("params", {})),
        }
    except LookupError as error:
        return {"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32602, "message": f"wrong: {error}"}}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            capabilities = {"tools": {}}
            server = {"name": "test", "version": "1"}
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": capabilities,
                "serverInfo": server,
            }
        case "tools/list":
            at = int(params.get("cursor", "0"))
            return {
                "tools": TOOLS[at : at + 3],
                **({"nextCursor": str(at + 3)} if at + 3 < len(TOOLS) else {}),
            }
        case "tools/call":
            return called(params["name"], params["arguments"])
        case "ping":
            return {}
    raise LookupError(method)


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "add":
            return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
        case "picture":
            picture = {"type": "image", "mimeType": "image/png", "data": "aGk="}
            return {"content": [{"type": "text", "text": "see:"}, picture]}
        case "fail":
            return {"content": [{"type": "text", "text": "no such note"}], "isError": True}
        case "sleep":
            time.sleep(float(os.environ.get("SLEEP", "600")))
            return {"content": []}
        case "die":
            sys.stderr.write("out of notes\n")
            sys.stderr.flush()
            os._exit(7)
        case "where":
            return {
                "content": [],
                "structuredContent": {"cwd": str(Path.cwd()), "given": os.environ.get("GIVEN")},
            }
        case "long":
            return {"content": [{"type": "text", "text": "x" * 100_000}]}
    raise LookupError(name)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    say("starting up ...")
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("method") == "tools/call":
            say(json.dumps({"jsonrpc": "2.0", "id": "s1", "method": "sampling/createMessage"}))
            say(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
            refused = json.loads(sys.stdin.readline())
            assert refused["error"]["code"] == -32601, refused
        found = answer(asked)
        if found is not None:
            say(json.dumps(found))


if __name__ == "__main__":
    main()
