"""An agent with OpenAI's package: it runs the model's Python code until the model answers without a call.

`OPENAI_BASE_URL` and `OPENAI_API_KEY` are set where it runs; it knows nothing else of the service.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
FUNCTION = {"name": "python", "description": "Run code.", "parameters": PARAMETERS}


def run(arguments: str, variables: dict[str, Any]) -> str:
    """Run code and return what it prints, and the error that ended it."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            exec(json.loads(arguments)["code"], variables)
        except Exception:  # noqa: BLE001 - the model is told
            output.write(traceback.format_exc(limit=0))
    return output.getvalue().strip() or "[no output]"


def main(question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    variables: dict[str, Any] = {}
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]
    model = os.environ["OPENAI_MODEL"]
    with OpenAI() as client:
        while True:
            answer = client.chat.completions.create(model=model, messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                result = run(call.function.arguments, variables)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


main(sys.argv[1])
