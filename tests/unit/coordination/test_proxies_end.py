"""A proxy's end of the conversation, with a coordinator that lies or is out of its mind."""

import asyncio
from typing import Any, cast

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rescheduler.coordination.coordinated_cluster import WatchedPlacements
from rescheduler.coordination.link import Link
from rescheduler.coordination.messages import (
    MOST_FAILURES,
    MOST_REQUESTS,
    Answer,
    CoordinationError,
    MoveOrder,
    Notice,
    Report,
    View,
    decode,
    encode,
)
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.step_time.mean_step_time import MeanStepTime

TOKENIZER = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
CLIENT = read_request(COMPLETIONS, b'{"prompt": "a", "max_tokens": 100}')
VIEW = View([False, False], 0)


def link() -> Link:
    named = ["decode-0", "decode-1"]
    instances = [
        InstanceState(Instance(name, "decode", f"http://{name}:1"), ProxyOptions(), None)
        for name in named
    ]
    step, carry_out = MeanStepTime(), cast(Any, None)
    return Link("session", instances, "digest", 1.5, lambda: 0.0, step, carry_out, lambda: None)


def arrived(on: Link, name: str) -> LiveRequest:
    placements = WatchedPlacements(on.changed)
    return LiveRequest(name, name, CLIENT, {}, 0.0, TOKENIZER, placements)


@pytest.mark.parametrize(
    "what",
    [
        {"answers": [Answer(1, 2)]},
        {"answers": [Answer(1, 4_095)]},
        {"moves": [MoveOrder(1, 0, 0, 2, "why")]},
        {"moves": [MoveOrder(1, 0, 2, 0, "why")]},
        {"view": View([True], 0)},
        {"view": View([True] * 3, 0)},
    ],
)
async def test_a_notice_of_other_instances_is_refused_as_a_whole(what: dict[str, Any]) -> None:
    conversation = link()
    conversation.receive(Notice("c", 1, view=VIEW))
    request = arrived(conversation, "a")
    asking = asyncio.create_task(conversation.ask(request, for_prefill=False))
    await asyncio.sleep(0)
    with pytest.raises(CoordinationError, match=r"(instance|instances of) "):
        conversation.receive(Notice("c", 2, **{"answers": [Answer(1, 0)], **what}))
    await asyncio.sleep(0)
    assert not asking.done()
    conversation.receive(Notice("c", 2, answers=[Answer(1, 1)]))
    place = await asking
    assert place is not None
    assert place.name == "decode-1"


async def test_what_is_unknown_or_not_asked_for_changes_nothing() -> None:
    conversation = link()
    order = MoveOrder(2**40, 0, 0, 1, "why")
    conversation.receive(Notice("c", 1, answers=[Answer(2**40, 0)], moves=[order], view=VIEW))
    report = conversation.report(beat=True)
    assert report is not None
    assert not report.moves


async def test_everything_is_reported_a_few_times_a_second_however_often_it_is_asked_for() -> None:
    conversation = link()
    conversation.changed(arrived(conversation, "a"))
    first = conversation.report(beat=True)
    assert first is not None
    assert first.whole
    for number in range(1, 100):
        conversation.receive(Notice("c", number, whole_please=True))
        assert conversation.report(beat=False) is None
    again = conversation.report(beat=True)
    assert again is not None
    assert again.whole


async def test_more_than_a_report_holds_goes_into_the_next() -> None:
    conversation = link()
    for i in range(MOST_REQUESTS + 10):
        request = arrived(conversation, str(i))
        conversation.changed(request)
        assert conversation.full == (MOST_REQUESTS - i - 1 <= 1024)
    requests = list(conversation._requests)
    for instance in conversation._instances:
        for _ in range(MOST_FAILURES):
            conversation.failed(instance, certain=True)
    assert len(said(conversation, beat=True).records) == MOST_REQUESTS
    for request in requests:
        conversation.ended(request, by_itself=True)
    assert len(said(conversation, beat=False).ended) == MOST_REQUESTS
    assert len(said(conversation, beat=False).ended) == 10
    assert conversation.report(beat=False) is None


def said(conversation: Link, beat: bool) -> Any:
    """The report, as the coordinator reads it."""
    report = conversation.report(beat)
    assert report is not None
    return decode(encode(report), Report)
