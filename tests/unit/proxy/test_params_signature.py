"""Who may say whose KV cache an engine reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.live.telemetry_messages import TelemetryError
from predictor.live.zmq_sockets import create_keys, shared_secret
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, EngineBodies
from rescheduler.openai.request_reader import read_request
from rescheduler.transfer.migration_params import is_signed, signed

SECRET = b"s" * 32

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text(), values, max_size=4)


@given(objects, objects)
def test_what_was_signed_is_recognised_after_its_way_through_json(
    rest: dict[str, Any], headway: dict[str, Any]
) -> None:
    params = signed({**rest, "headway": headway}, SECRET)
    assert is_signed(json.loads(json.dumps(params)), SECRET)
    assert is_signed({**params, "prompt_token_ids": [1, 2]}, SECRET)
    assert not is_signed(params, b"t" * 32)


@given(st.data())
def test_any_other_parameter_needs_another_signature(data: st.DataObject) -> None:
    headway = {"id": "a", "hop": 0, "generated": 3}
    params = {"remote_request_id": "x", "remote_port": 1, "remote_block_ids": [[1, 2]]}
    given_out = signed({**params, "headway": headway}, SECRET)
    forged = json.loads(json.dumps(given_out))
    inside = data.draw(st.booleans())
    part = forged["headway"] if inside else forged
    names = [name for name in part if name not in ("headway", "signature")]
    name = data.draw(st.sampled_from(names) | st.text(min_size=1).map(lambda t: "new " + t))
    if data.draw(st.booleans()) and name in part:
        del part[name]
    else:
        before = part.get(name, ...)
        part[name] = data.draw(
            values.filter(lambda value: json.dumps(value) != json.dumps(before))
            if before is not ...
            else values
        )
    assert not is_signed(forged, SECRET)


@given(values)
def test_nothing_that_a_stranger_sends_is_taken_for_signed(value: Any) -> None:
    assert not is_signed({"headway": value}, SECRET)
    assert not is_signed({"headway": {"signature": value}}, SECRET)
    assert not is_signed({"do_remote_prefill": True}, SECRET)


def test_both_sides_of_the_keys_agree_and_nobody_else(tmp_path: Path) -> None:
    folder, other = tmp_path / "keys", tmp_path / "other"
    create_keys(folder)
    create_keys(other)
    secret = shared_secret(folder, "engine")
    assert len(secret) == 32
    assert shared_secret(folder, "watcher") == secret
    (folder / "watcher.key_secret").unlink()  # as on the engines' machine
    assert shared_secret(folder, "engine") == secret
    assert shared_secret(other, "engine") != secret
    (other / "engine.key_secret").unlink()
    with pytest.raises(TelemetryError, match=r"engine\.key_secret: no such key"):
        shared_secret(other, "engine")


def test_all_that_an_engine_is_asked_is_signed() -> None:
    bodies = EngineBodies(SECRET)
    for path in (COMPLETIONS, CHAT):
        prompt = {"messages": []} if path == CHAT else {"prompt": "a"}
        asked = read_request(path, json.dumps({"model": "m", **prompt}).encode())
        for body in (
            bodies.prefill(asked, "id", 0),
            bodies.decode(asked, "id", 0, {"remote_port": 1}),
            bodies.resumed(asked, "id", 1, [1], [2], {"remote_port": 1}),
            bodies.copy(asked, "id", 1, [1, 2], {"remote_port": 1}),
        ):
            assert is_signed(json.loads(body)["kv_transfer_params"], SECRET)
