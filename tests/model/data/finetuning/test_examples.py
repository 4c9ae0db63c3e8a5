"""Lines of JSON are examples, or are refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hal.model.data.finetuning.examples import BadExample, Completion, Conversation, parse

ASK, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}


def test_the_forms_of_an_example() -> None:
    assert parse(b'{"prompt": "2 + 2 =", "completion": " 4", "id": 7}') == Completion("2 + 2 =", " 4")
    assert parse(b'{"prompt": "", "response": "4"}') == Completion("", "4")
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    messages = [{"role": "system", "content": ""}, ASK, call, {"role": "tool", "content": "4"}, ANSWER]
    line = json.dumps({"messages": messages, "tools": [{"type": "function"}]}).encode()
    assert parse(line) == Conversation(messages, [{"type": "function"}])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{", "the line is not valid JSON"),
        ('{"prompt": "\\ud8', "the line is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ([], "an example is a JSON object; found list"),
        ({}, "found no field"),
        ({"text": "2 + 2 = 4"}, "an example has 'messages', or 'prompt' with 'completion' or 'response'"),
        ({"prompt": "2"}, "an example has 'messages'"),
        ({"prompt": "2", "completion": "4", "response": "4"}, "an example has 'messages'"),
        ({"prompt": "2", "messages": [ASK, ANSWER]}, "it has both 'messages' and 'prompt'"),
        ({"prompt": 2, "completion": "4"}, "'prompt' should be a text; found 2"),
        ({"prompt": "2", "completion": None}, "'completion' should be a text; found None"),
        ({"prompt": "2", "response": " \n"}, "'response' is empty"),
        ({"messages": {}}, "'messages' should be a list of at least one message"),
        ({"messages": []}, "'messages' should be a list of at least one message"),
        ({"messages": [ASK, ANSWER], "tools": "add"}, "'tools' should be a list"),
        ({"messages": [ASK]}, "no message is of the assistant"),
        ({"messages": [ASK, "4"]}, "message 2: it should be a JSON object; found '4'"),
        ({"messages": [{"content": "4"}]}, "message 1: it has no 'role'"),
        ({"messages": [ASK, {"role": "assistant"}]}, "message 2: it has no 'content'"),
        ({"messages": [{"role": "human", "content": ""}]}, "the role should be one of system, user, assistant, tool"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "the role should be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'content' should be a text; found list"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, "'content' should be a text; found None"),
        ({"messages": [ASK, {"role": "assistant", "content": " "}]}, "message 2: the assistant's answer is empty"),
        ({"messages": [ASK, ANSWER, {"role": "system", "content": ""}]}, "message 3: a system message can only be"),
    ],
)
def test_what_is_no_example_is_refused_with_the_reason(value: Any, reason: str) -> None:
    line = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(BadExample) as caught:
        parse(line.encode())
    assert reason in str(caught.value) and len(str(caught.value)) < 400


def test_other_bytes_than_utf_8_are_refused() -> None:
    with pytest.raises(BadExample, match="not valid JSON"):
        parse(b'{"prompt": "\xff", "completion": "4"}')
