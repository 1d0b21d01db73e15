"""What engines are asked in a client's name."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.openai.body_fields import fields_of
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, EngineBodies, RequestRefusedError
from rescheduler.openai.request_reader import read_request
from rescheduler.transfer.migration_params import MigrationParams

BODIES = EngineBodies()
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e"}


def body_of(raw: bytes) -> dict[str, Any]:
    value = json.loads(raw)
    assert isinstance(value, dict)
    return value


def request(path: str = COMPLETIONS, **body: Any) -> Any:
    return read_request(path, json.dumps({"model": "m", **body}).encode())


def test_a_prefill_generates_one_token_and_keeps_its_blocks() -> None:
    asked = request(
        prompt="a", max_tokens=50, min_tokens=9, stop=["b"], stream=True, seed=3, logprobs=2
    )
    body = body_of(BODIES.prefill(asked, "id", 0))
    assert body == {
        "model": "m",
        "prompt": "a",
        "seed": 3,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "headway": {"id": "id", "hop": 0, "max_tokens": 50},
        },
    }
    chat = body_of(BODIES.prefill(request(CHAT, messages=[], max_tokens=7), "id", 0))
    assert chat["max_completion_tokens"] == 1
    assert "max_tokens" not in chat


@given(
    st.dictionaries(
        st.sampled_from(["temperature", "user", "metadata", "x_new_field", "guided", "seed"]),
        st.one_of(st.integers(-5, 5), st.text(max_size=5), st.lists(st.booleans(), max_size=2)),
    )
)
def test_fields_that_the_proxy_does_not_know_pass_as_they_are(extra: dict[str, Any]) -> None:
    asked = request(prompt="a", **extra)
    for raw in (
        BODIES.prefill(asked, "id", 0),
        BODIES.decode(asked, "id", 0, PARAMS),
        BODIES.resumed(asked, "id", 1, [1], [2], PARAMS),
    ):
        assert body_of(raw).items() >= extra.items()


def test_the_decode_instance_gets_the_prefills_parameters_and_returns_tokens() -> None:
    body = body_of(BODIES.decode(request(prompt="a"), "id", 2, PARAMS))
    assert body["kv_transfer_params"] == {**PARAMS, "headway": {"id": "id", "hop": 2}}
    assert body["return_token_ids"] is True
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}  # for the answer as a whole
    streamed = body_of(BODIES.decode(request(prompt="a", stream=True), "id", 0, None))
    assert "stream_options" not in streamed


@given(
    output=st.lists(st.integers(0, 99), min_size=1, max_size=40),
    most=st.none() | st.integers(41, 99),
    least=st.integers(0, 80),
    chat=st.booleans(),
)
def test_a_resumed_request_goes_on_where_it_was(
    output: list[int], most: int | None, least: int, chat: bool
) -> None:
    field = "max_completion_tokens" if chat else "max_tokens"
    path = CHAT if chat else COMPLETIONS
    given_ = {"messages": [], "prompt": "a", "min_tokens": least, "stop": ["s"]}
    asked = request(path, **given_, **({} if most is None else {field: most}))
    if not chat and most is None and len(output) >= 16:
        return  # it has ended: the default is 16
    body = body_of(BODIES.resumed(asked, "id", 3, [7, 8], output, PARAMS))
    transfer = body["kv_transfer_params"]
    assert transfer["headway"] == {"id": "id", "hop": 3, "generated": len(output)}
    assert (transfer["prompt_token_ids"] if chat else body["prompt"]) == [7, 8, *output]
    if most is not None:
        assert body[field] == most - len(output)
    elif chat:
        assert field not in body
    else:
        assert body[field] == 16 - len(output)
    if least:
        assert body["min_tokens"] == max(0, least - len(output))
    assert "stop" not in body  # the proxy looks for it


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("echo", True),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("suffix", "b"),
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
    ],
)
def test_some_requests_are_one_engines_alone(field: str, value: Any) -> None:
    asked = request(**{"prompt": "a", field: value})
    assert asked.direct == field
    body = body_of(BODIES.decode(asked, "id", 0, None))
    assert body == {"model": "m", "prompt": "a", field: value}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("include_reasoning", False),
        ("thinking_token_budget", 5),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ),
    ],
)
def test_some_requests_are_prefilled_elsewhere_but_do_not_move(field: str, value: Any) -> None:
    asked = request(CHAT, **{"messages": [], field: value})
    assert asked.pinned == field
    assert not asked.direct
    assert "return_token_ids" not in body_of(BODIES.decode(asked, "id", 0, PARAMS))


@pytest.mark.parametrize(
    ("path", "tools", "has"),
    [
        (CHAT, [{"type": "function"}], True),
        (CHAT, [], False),
        (CHAT, None, False),
        (COMPLETIONS, [{"type": "function"}], False),
    ],
)
def test_a_chat_with_tools_may_move(path: str, tools: Any, has: bool) -> None:
    asked = request(path, **{"messages": [], "tools": tools})
    assert asked.movable
    assert asked.tools is has


def test_an_engine_is_told_where_an_answer_stands_that_it_has_to_parse_again() -> None:
    asked = request(CHAT, messages=[], tools=[{}], stream=True, stop="x")
    so_far = {"shown": 2, "chunks": [[2, 1]], "stop": ["x"], "whole": False}
    body = body_of(BODIES.resumed(asked, "id", 1, [7], [8, 9], None, so_far))
    assert "stop" not in body
    headway = body["kv_transfer_params"]["headway"]
    assert headway == {"id": "id", "hop": 1, "generated": 2, "answer": so_far}
    assert msgspec.convert(headway, MigrationParams).answer is not None
    whole = request(CHAT, messages=[], tools=[{}])
    body = body_of(BODIES.decode(whole, "id", 0, None))
    assert body["kv_transfer_params"]["headway"]["answer"] == {"whole": True}
    assert body["stream"]


@pytest.mark.parametrize(
    ("stop", "pinned"),
    [
        (["a"] * 64, ""),
        (["a"] * 65, "stop"),
        ([f"s{i}" for i in range(20_000)], "stop"),
        ("a" * (16 << 10), ""),
        ("a" * ((16 << 10) + 1), "stop"),
        (["a" * 9000] * 2, "stop"),
    ],
)
def test_more_stop_strings_than_the_proxy_would_look_for_do_not_move(
    stop: Any, pinned: str
) -> None:
    raw = json.dumps({"model": "m", "prompt": "a", "stop": stop}).encode()
    assert read_request(COMPLETIONS, raw).pinned == pinned


def test_ordinary_requests_move() -> None:
    text = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for asked in (
        request(prompt=["one prompt in a list"]),
        request(prompt=[1, 2, 3]),
        request(prompt="a", n=1, echo=False, tools=None),
        request(CHAT, messages=text),
    ):
        assert asked.movable


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "a", ' + b", ".join(b'"%d": 1' % i for i in range(50_000)) + b"}",
        b'{"prompt": "a", "stop": [' + b'"", ' * 100_000 + b'""]}',
        b"{" + b'"prompt": "a", ' * 50_000 + b'"prompt": "a"}',
    ],
)
def test_many_small_fields_are_refused_before_they_are_read(raw: bytes) -> None:
    with pytest.raises(RequestRefusedError, match=r"take \d+ bytes together") as caught:
        read_request(COMPLETIONS, raw)
    assert caught.value.status == 400


def test_a_long_prompt_is_not_read_but_handed_on() -> None:
    ids = list(range(200_000))
    asked = request(prompt=ids)
    assert asked.movable
    assert asked.prompt_ids == len(ids)
    assert body_of(BODIES.decode(asked, "id", 0, None))["prompt"] == ids
    nested = request(prompt=[[]] * 500_000)
    assert nested.direct == "prompt"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prompt", "suffix", "tools", "user", "model", "stop"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            ),
        ),
        max_size=8,
    ),
    st.integers(0, 2),
)
def test_a_large_body_is_read_as_a_small_one_is(fields: list[tuple[str, Any]], where: int) -> None:
    fields.insert(min(where, len(fields)), ("messages", "a" * 300_000))
    listed = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields]
    raw = ("{" + ", ".join(listed) + "}").encode()
    read = fields_of(raw)
    assert {name: json.loads(bytes(value)) for name, value in read.items()} == dict(fields)


def test_more_messages_than_anyone_looks_at_do_not_move() -> None:
    long = [{"role": "user", "content": "a" * 900_000}]
    assert request(CHAT, messages=long).movable
    assert request(CHAT, messages=[*long, *long]).pinned == "messages"


@pytest.mark.parametrize("messages", [3, "text", [{"content": 3}], [[]]])
def test_messages_of_another_shape_are_the_engines_to_refuse(messages: Any) -> None:
    asked = request(CHAT, messages=messages)
    assert body_of(BODIES.decode(asked, "id", 0, None))["messages"] == messages


def test_a_priority_is_forwarded_only_where_the_operator_says_so() -> None:
    raw = b'{"prompt": "a", "priority": -5}'
    assert "priority" not in body_of(BODIES.decode(read_request(COMPLETIONS, raw), "id", 0, None))
    forwarded = read_request(COMPLETIONS, raw, priority=True)
    assert body_of(BODIES.decode(forwarded, "id", 0, None))["priority"] == -5
