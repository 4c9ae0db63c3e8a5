"""Examples of supervised finetuning, one per JSON line: a prompt and its completion, or the messages of a conversation.

Nothing about a line is trusted: a line that is no example raises `BadExample` with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hal.untrusted import parse_json, shown

from ...config.schema import ConfigError

ROLES = ("system", "user", "assistant", "tool")
"""Who can speak in a conversation. The loss counts what the assistant says."""

_MAX_LINE_BYTES = 64 << 20


class BadExample(ConfigError):
    """A line that is no example; the message is the reason."""


@dataclass(frozen=True)
class Completion:
    """A text and how it continues. The loss counts the continuation."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages with at least one answer of the assistant. tools: descriptions of functions, as the template takes them.

    A message is a dictionary with a role of ROLES, the text `content`, and whatever else a template may read, such as
    tool_calls.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


def parse(line: bytes) -> Completion | Conversation:
    """The example of a JSON line. Raises BadExample."""
    value = parse_json(line, "the line", BadExample, _MAX_LINE_BYTES)
    if not isinstance(value, dict):
        raise BadExample(f"an example is a JSON object; found {shown(value)}")
    if "messages" in value:
        if "prompt" in value:
            raise BadExample("it has both 'messages' and 'prompt'; give one of them")
        return _conversation(value)
    answers = [name for name in ("completion", "response") if name in value]
    if "prompt" not in value or len(answers) != 1:
        names = ", ".join(map(repr, value))[:80] or "no field"
        raise BadExample(f"an example has 'messages', or 'prompt' with 'completion' or 'response'; found {names}")
    prompt, completion = _text(value, "prompt"), _text(value, answers[0])
    if not completion.strip():
        raise BadExample(f"'{answers[0]}' is empty: there is no answer to learn")
    return Completion(prompt, completion)


def _text(value: dict[str, Any], name: str) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise BadExample(f"'{name}' should be a text; found {shown(text)}")
    return text


def _conversation(value: dict[str, Any]) -> Conversation:
    messages, tools = value["messages"], value.get("tools")
    if not isinstance(messages, list) or not messages:
        raise BadExample(f"'messages' should be a list of at least one message; found {shown(messages)}")
    if tools is not None and not isinstance(tools, list):
        raise BadExample(f"'tools' should be a list; found {shown(tools)}")
    for number, message in enumerate(messages, 1):
        try:
            _check_message(message, number == 1)
        except BadExample as error:
            raise BadExample(f"message {number}: {error.text}") from None
    if not any(message["role"] == "assistant" for message in messages):
        raise BadExample("no message is of the assistant: there is no answer to learn")
    return Conversation(messages, tools)


def _check_message(message: Any, first: bool) -> None:
    if not isinstance(message, dict):
        raise BadExample(f"it should be a JSON object; found {shown(message)}")
    missing = [name for name in ("role", "content") if name not in message]
    calls = message.get("role") == "assistant" and bool(message.get("tool_calls"))
    if missing and not (calls and missing == ["content"]):
        raise BadExample(f"it has no '{missing[0]}'")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise BadExample(f"the role should be one of {', '.join(ROLES)}; found {shown(role)}")
    # Megatron's files put several conversations into one line, each with a system message at its start.
    if role == "system" and not first:
        raise BadExample("a system message can only be the first one; give each conversation a line of its own")
    if not (isinstance(content, str) or (calls and content is None)):
        raise BadExample(f"'content' should be a text; found {shown(content)}")
    if role == "assistant" and not calls and not str(content).strip():
        raise BadExample("the assistant's answer is empty")
