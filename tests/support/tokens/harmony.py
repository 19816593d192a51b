"""A stand-in for the encoder of the harmony format, whose real vocabulary is loaded from the network.

It writes the messages from `renderers` in harmony's layout, with a tokenizer of `chat_formats`. Like the real encoder,
it encodes texts without looking for control tokens.
"""

from pathlib import Path

from openai_harmony import Conversation, Message
from tokenizers import Tokenizer


class HarmonyStandIn:
    """The two methods of `openai_harmony.HarmonyEncoding` that a renderer calls."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._plain.encode_special_tokens = True

    def render_conversation(self, conversation: Conversation) -> list[int]:
        """Return the ids of all messages, one after the other."""
        return [token for message in conversation.messages for token in self.render(message)]

    def render(self, message: Message) -> list[int]:
        """Return the ids of `<|start|>author to=recipient<|channel|>name<|message|>text<|end|>`."""
        author = message.author.name or str(message.author.role.value)
        recipient = f" to={message.recipient}" if message.recipient else ""
        channel = [self._id("<|channel|>"), *self._text(message.channel)] if message.channel else []
        text = "".join(getattr(part, "text", None) or part.model_dump_json() for part in message.content)
        called = message.author.role.value == "assistant" and message.recipient
        return [
            self._id("<|start|>"),
            *self._text(author + recipient),
            *channel,
            self._id("<|message|>"),
            *self._text(text),
            self._id("<|call|>" if called else "<|end|>"),
        ]

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        assert found is not None
        return found

    def _text(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids
