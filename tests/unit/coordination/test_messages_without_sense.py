"""Messages that no Headway can have meant are refused as a whole."""

import math
from typing import Any

import msgspec
import pytest

from rescheduler.coordination.limits import MOST
from rescheduler.coordination.messages import (
    TOPIC,
    CoordinationError,
    MoveEnded,
    Record,
    Report,
    decode_report,
    encode,
)

RECORD = Record(
    handle=1,
    id="id",
    name="name",
    external_id="cmpl-name",
    ticket=0,
    for_prefill=False,
    waited=0.0,
    instance=0,
    destination=0,
    hop=0,
    prompt_tokens=8,
    generated_tokens=0,
    generated_at_move=None,
    max_tokens=None,
    movable=True,
    several=False,
    can_move=False,
    moving=False,
    generating=False,
    on_its_way=True,
    avoid=[],
)


def report(**values: Any) -> list[bytes]:
    said = Report("session", 1, "", 0, "digest", "", records=[RECORD])
    return encode(msgspec.structs.replace(said, **values))


def test_one_with_sense_is_read() -> None:
    assert decode_report(report()).records == [RECORD]


@pytest.mark.parametrize(
    "values",
    [
        {"waited": math.nan},
        {"waited": math.inf},
        {"waited": -1.0},
        {"prompt_tokens": MOST + 1},
        {"generated_tokens": 2**63},
        {"generated_at_move": 2**63},
        {"max_tokens": -1},
        {"handle": 2**63},
        {"hop": 2**63},
        {"hop": -2},
        {"instance": -2},
    ],
)
def test_a_record(values: dict[str, Any]) -> None:
    with pytest.raises(CoordinationError, match="invalid message"):
        decode_report(report(records=[msgspec.structs.replace(RECORD, **values)]))


@pytest.mark.parametrize(
    "values",
    [
        {"number": 2**63},
        {"step_seconds": math.nan},
        {"step_seconds": math.inf},
        {"session": ""},
        {"moves": [MoveEnded(1, 2**63, "moved")]},
    ],
)
def test_a_report(values: dict[str, Any]) -> None:
    with pytest.raises(CoordinationError, match="invalid message"):
        decode_report(report(**values))


@pytest.mark.parametrize("damaged", [b"", b"\xc1", b"\x90", b"\x91" * 100_000])
def test_bytes(damaged: bytes) -> None:
    with pytest.raises(CoordinationError, match="invalid message"):
        decode_report([TOPIC, damaged])
