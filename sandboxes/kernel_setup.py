"""Run inside of each kernel before the first cell: no message gets so large that the host would refuse it.

Sent as text, never imported. It changes nothing about what code computes: long prints go out in several
messages, long results and exceptions are cut in the middle. Only plain text is made of a value, and IPython's
second copy of everything printed is not kept.
"""


def _prepare(limit: int = 256 * 1024) -> None:
    from collections.abc import Iterator
    from contextlib import nullcontext
    from typing import Any

    from ipykernel.iostream import OutStream
    from IPython.core.getipython import get_ipython

    if hasattr(OutStream, "bounded"):
        return

    def cut(text: Any) -> Any:
        if not isinstance(text, str) or len(text) <= limit:
            return text
        half, left_out = limit // 2, len(text) - limit
        return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"

    stream: Any = OutStream
    buffers = stream._flush_buffers

    def bounded_buffers(self: Any) -> Iterator[tuple[Any, str]]:
        for parent, text in buffers(self):
            for start in range(0, len(text), limit):
                yield parent, text[start : start + limit]

    stream._flush_buffers, stream.bounded = bounded_buffers, True

    shell: Any = get_ipython()
    represent, send = shell.display_formatter.format, shell.kernel.session.send

    def bounded_format(value: object, **wanted: Any) -> tuple[dict[str, Any], Any]:
        data, metadata = represent(value, **wanted)
        return {kind: cut(text) for kind, text in data.items()}, metadata

    def bounded_send(stream: Any, message: Any, content: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(content, dict) and "evalue" in content:
            lines = [cut(line) for line in content.get("traceback", [])]
            content = {**content, "evalue": cut(content["evalue"]), "traceback": lines}
        return send(stream, message, content, *arguments, **named)

    shell.display_formatter.active_types = ["text/plain"]
    shell.display_formatter.format = bounded_format
    shell.kernel.session.send = bounded_send
    shell._tee = lambda channel: nullcontext()  # noqa: ARG005  its name is given


_prepare()
del _prepare
