"""Messages that no Headway can have meant are refused as a whole."""

import math
from typing import Any

import coordinating
import msgspec
import pytest

from rescheduler.coordination.messages import (
    MOST,
    Answer,
    CoordinationError,
    Ended,
    Failure,
    MoveEnded,
    MoveOrder,
    Notice,
    Refusal,
    Report,
    View,
    decode,
    encode,
)

RECORD = msgspec.structs.replace(coordinating.RECORD, instance=0, destination=0, hop=0)
VIEW = View([False], 0)
REPORT = Report("session", 1, "", 0, "digest", records=[RECORD])
NOTICE = Notice("incarnation", 1, view=VIEW)


@pytest.mark.parametrize("message", [REPORT, NOTICE], ids=["report", "notice"])
def test_one_with_sense_is_read(message: Any) -> None:
    assert decode(encode(message), type(message)) == message


RECORDS: list[dict[str, Any]] = [
    {"waited": math.nan},
    {"waited": math.inf},
    {"waited": -1.0},
    {"waited": 2e6},
    {"prompt_tokens": 2**24 + 1},
    {"generated_tokens": 2**63},
    {"generated_at_move": 2**63},
    {"max_tokens": -1},
    {"handle": 2**63},
    {"hop": 2**63},
    {"hop": -2},
    {"instance": -2},
    {"instance": 4096},
    {"avoid": [0] * 4097},
    {"name": "a\nb"},
    {"name": "a\x1b[2J"},
    {"name": "a\n"},
    {"id": "a\u202eb"},
    {"external_id": "a" * 161},
]
REPORTS: list[dict[str, Any]] = [
    *({"records": [msgspec.structs.replace(RECORD, **values)]} for values in RECORDS),
    {"number": 2**63},
    {"number": MOST + 1},
    {"step_seconds": math.nan},
    {"step_seconds": math.inf},
    {"step_seconds": 61.0},
    {"session": ""},
    {"session": "a\n"},
    {"session": "a" * 65},
    {"deployment": "digest\x1b[2J"},
    {"deployment": "d" * 161},
    {"incarnation": "\n"},
    {"records": [RECORD] * 16_385},
    {"ended": [Ended(1, True, 1)] * 16_385},
    {"ended": [Ended(1, True, 2**24 + 1)]},
    {"failures": [Failure(0, True)] * 65},
    {"failures": [Failure(4096, True)]},
    {"handles": b"0" * (8 * 16_385)},
    {"draining": [0] * 4097},
    {"moves": [MoveEnded(1, 0, "moved\nby me")]},
    {"moves": [MoveEnded(1, 0, "a" * 33)]},
    {"moves": [MoveEnded(1, 2**63, "moved")]},
]
NOTICES: list[dict[str, Any]] = [
    {"number": MOST + 1},
    {"answers": [Answer(1, 4096)]},
    {"answers": [Answer(1, 0)] * 1025},
    {"answers": [Answer(1, -1, Refusal(999, "no", None))]},  # type: ignore[arg-type]
    {"answers": [Answer(1, -1, Refusal(200, "no", None))]},  # type: ignore[arg-type]
    {"answers": [Answer(1, -1, Refusal(429, "n" * 1_000_000, None))]},
    {"answers": [Answer(1, -1, Refusal(429, "no\r\nX-Header: 1", None))]},
    {"answers": [Answer(1, -1, Refusal(503, "no", 2**40))]},
    {"answers": [Answer(1, -1, Refusal(503, "no", -1))]},
    {"moves": [MoveOrder(1, 0, 0, 4096, "why")]},
    {"moves": [MoveOrder(1, 0, 0, 1, "why\n")]},
    {"moves": [MoveOrder(1, 0, 0, 1, "why")] * 257},
    {"refused": "n" * 513},
    {"view": View([False] * 4097, 0)},
    {"view": View([False], 2**63)},
    {"view": View([False], -1)},
]


@pytest.mark.parametrize(
    ("message", "values"),
    [
        *((REPORT, values) for values in REPORTS),
        *((NOTICE, values) for values in NOTICES),
    ],
)
def test_one_without_sense_is_refused(message: Any, values: dict[str, Any]) -> None:
    frames = encode(msgspec.structs.replace(message, **values))
    with pytest.raises(CoordinationError, match="invalid message"):
        decode(frames, type(message))
