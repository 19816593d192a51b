"""A server of the Model Context Protocol with one tool, on the standard library alone."""

import json
import sys
from typing import Any

PRICES = {"apple": 3, "pear": 4, "melon": 17}
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOL = {"name": "price", "description": "Return the price of one piece.", "inputSchema": SCHEMA}


def result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request, or None if the method is unknown."""
    if method == "initialize":
        about = {"name": "shop", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": about,
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        price = PRICES.get(params["arguments"].get("item"))
        text = "there is no such item" if price is None else str(price)
        return {"content": [{"type": "text", "text": text}], "isError": price is None}
    return {} if method == "ping" else None


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        found = result(asked["method"], asked.get("params", {}))
        answer = {"error": {"code": -32601, "message": "unknown"}} if found is None else {"result": found}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}) + "\n")
        sys.stdout.flush()
