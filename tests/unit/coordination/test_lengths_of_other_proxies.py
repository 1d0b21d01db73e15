"""What one proxy learns of lengths, the others know: through the coordinator."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from coordinated_cluster import Coordinated
from coordinating import shared_by_sessions
from live_requests import instance_state
from msgspec.structs import replace
from scripted_cluster import PROMPT, until

from benchmarks.support.engine_states import engine_state
from predictor.live.zmq_sockets import create_keys
from predictor.past.length_memory import LengthMemory, kept_chain
from rescheduler.coordination.link import Link
from rescheduler.coordination.messages import (
    MOST_LENGTHS,
    MOST_TOKENS,
    MOST_UNSAID,
    CoordinationError,
    LearnedLength,
    Notice,
    Report,
    View,
    decode,
    encode,
)
from rescheduler.coordinator.session import Session, Shared
from rescheduler.engines.deployment import CoordinatorOptions, Deployment
from rescheduler.engines.proxy_options import PastOptions, ProxyOptions
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.proxy.past_forecasts import PastForecasts, shared_salt
from rescheduler.step_time.profile import MeanStepTime

LENGTH = LearnedLength(1, 2**64 - 1, bytes(range(16)), 40, False)


@pytest.mark.cluster(order={"name": "boost"})
async def test_a_prompt_that_another_proxy_has_served_is_known(many: Coordinated) -> None:
    one, other = (cluster.proxy._past for cluster in many.proxies)
    assert one is not None
    assert other is not None
    assert one.memory.salt == other.memory.salt
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 30}
    for _ in range(3):
        assert (await many.proxies[0].post(body))[0] == 200
    await until(lambda: other.memory.known == one.memory.known > 0)
    assert (await many.proxies[1].post(body))[0] == 200
    forecasts = many.proxies[1].proxy.metrics.length_forecasts
    assert forecasts.labels("past")._value.get() == 1
    assert forecasts.labels("none")._value.get() == 0


@pytest.mark.cluster(order={"name": "boost"})
async def test_the_coordinator_s_page_says_how_good_all_proxies_forecasts_on_arrival_were(
    many: Coordinated,
) -> None:
    for engine in many.engines.values():
        engine.longest = 20
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    for i in range(4):
        assert await many.proxies[i % 2].stream(chat, path="/v1/chat/completions")
    of_proxies = [it.proxy.cluster.length_factors.latest["past"] for it in many.proxies]
    known = many.coordinator.cluster.length_factors.latest["past"]
    await until(lambda: len(known) == sum(map(len, of_proxies)) >= 2)
    assert sorted(known) == sorted(factor for latest in of_proxies for factor in latest)
    snapshot = LiveSnapshots(many.coordinator.cluster).look().snapshot()
    assert [one.source for one in snapshot.length_errors] == ["past"]
    assert snapshot.length_errors[0].answers == len(known)


VIEW = View([False], 0)


def sessions_of_a_coordinator(n: int) -> tuple[Shared, list[Session]]:
    instance = instance_state("d")
    instance.engine = engine_state(max_num_seqs=1)
    background = asyncio.get_running_loop().create_task
    shared = shared_by_sessions("c", [instance], ProxyOptions(), lambda: 0.0, background)
    return shared, [Session(f"s{number}", number, b"peer", None, shared) for number in range(n)]


def report(number: int, *learned: LearnedLength) -> Report:
    return Report("s", number, "c/1", 0, "digest", whole=True, learned=list(learned))


def told(session: Session) -> list[LearnedLength]:
    notice = session.notice(VIEW)
    assert notice is not None
    return list(notice.learned)


async def test_a_session_tells_all_others_and_each_length_once() -> None:
    shared, sessions = sessions_of_a_coordinator(3)
    for session in sessions:
        await session.receive(report(1))
    for _ in range(2):  # the second one is the first, doubled
        await sessions[0].receive(report(2, LENGTH))
    assert [told(session) for session in sessions] == [[], [LENGTH], [LENGTH]]
    assert [told(session) for session in sessions] == [[], [], []]
    await sessions[2].close()
    await sessions[0].receive(report(3, LENGTH))
    assert told(sessions[1]) == [LENGTH]
    assert set(shared.lengths) == set(sessions[:2])


async def test_of_many_lengths_the_latest_are_told_some_at_a_time() -> None:
    _, (one, other) = sessions_of_a_coordinator(2)
    clients = iter(range(1, 6_001))
    for number in range(1, 25):
        lengths = [replace(LENGTH, client=next(clients)) for _ in range(250)]
        await one.receive(report(number, *lengths))
    found: list[LearnedLength] = []
    while lengths := told(other):
        assert len(lengths) <= MOST_LENGTHS
        found += lengths
    assert [length.client for length in found] == [*range(6_001 - MOST_UNSAID, 6_001)]


async def test_what_no_model_can_generate_is_not_passed_on() -> None:
    _, (one, other) = sessions_of_a_coordinator(2)
    await one.receive(report(1, replace(LENGTH, length=MOST_TOKENS), LENGTH))
    assert told(other) == [LENGTH]


async def test_digests_of_another_size_are_refused() -> None:
    odd = replace(LENGTH, chain=bytes(12))
    _, (session,) = sessions_of_a_coordinator(1)
    step, carry_out = MeanStepTime(), cast(Any, None)
    instances = [instance_state("d")]
    conversation = Link("s", instances, "digest", 1.5, lambda: 0.0, step, carry_out, lambda: None)
    with pytest.raises(CoordinationError, match="digests of another size"):
        await session.receive(report(1, odd))
    taken: list[LearnedLength] = []
    conversation.taught = taken.extend
    with pytest.raises(CoordinationError, match="digests of another size"):
        conversation.receive(Notice("c", 1, view=VIEW, learned=[odd]))
    conversation.receive(Notice("c", 1, view=VIEW, learned=[LENGTH]))
    assert taken == [LENGTH]


@pytest.mark.parametrize("message", [report(1), Notice("c", 1)], ids=["report", "notice"])
@pytest.mark.parametrize(
    "values",
    [
        {"model": -1},
        {"client": -1},
        {"chain": b""},
        {"chain": bytes(8 * 65)},
        {"length": 0},
        {"length": MOST_TOKENS + 1},
    ],
)
def test_one_without_sense_is_refused(message: Any, values: dict[str, Any]) -> None:
    for learned in ([replace(LENGTH, **values)], [LENGTH] * (MOST_LENGTHS + 1)):
        with pytest.raises(CoordinationError, match="invalid message"):
            decode(encode(replace(message, learned=learned)), type(message))
    sensible = replace(message, learned=[LENGTH])
    assert decode(encode(sensible), type(message)) == sensible


def begun(forecasts: PastForecasts) -> LiveRequest:
    """Return a request that has arrived, and is forecast."""
    raw = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 2000}).encode()
    asked = read_request(COMPLETIONS, raw)
    request = LiveRequest("id", "name", asked, {}, 0.0, None, Placements[LiveRequest]())
    request.account.name = "a"
    request.expected_tokens = forecasts.expected(request)
    return request


def end(forecasts: PastForecasts, request: LiveRequest, tokens: int) -> None:
    request.reported(5, tokens)
    forecasts.ended(request, by_itself=True)


def test_requests_of_a_prompt_are_forecast_anew_as_another_proxy_has_answered_it() -> None:
    one, other = (PastForecasts(PastOptions(), bytes(32)) for _ in range(2))
    one.tell = lambda length: other.take([length])
    end(other, begun(other), 900)
    waiting = begun(other)
    before = waiting.expected_tokens
    for _ in range(4):
        end(one, begun(one), 7)
    assert before is not None
    assert waiting.expected_tokens is not None
    assert waiting.expected_tokens < before / 3
    end(other, waiting, 7)
    assert not other._siblings


def test_as_much_of_a_long_prompt_is_told_as_is_kept() -> None:
    one, other = LengthMemory(salt=bytes(32)), LengthMemory(salt=bytes(32))
    chain = np.arange(1, 201, dtype=np.uint64)
    recalled = one.recall(1, 1, chain)
    assert recalled.trail.tolist() == other.recall(1, 1, kept_chain(chain)).trail.tolist()


def test_a_file_of_other_digests_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = PastOptions(keys=64, file=str(tmp_path / "past"))
    first = PastForecasts(options, bytes(32))
    first.memory.learn(first.memory.recall(1, 1, np.ones(1, dtype=np.uint64)), 5)
    first.close()
    assert PastForecasts(options, bytes(32)).memory.known > 0
    assert PastForecasts(options).memory.known > 0
    assert PastForecasts(options, b"1" * 32).memory.known == 0
    assert "digests by another salt" in caplog.text


def test_proxies_of_one_deployment_make_the_same_digests(tmp_path: Path) -> None:
    alone = deployment()
    assert shared_salt(alone) is None
    by_all = [shared_salt(deployment(coordinator=COORDINATOR)) for _ in range(2)]
    assert by_all[0] == by_all[1] is not None
    create_keys(tmp_path / "keys")
    keyed = deployment(coordinator=COORDINATOR, keys=str(tmp_path / "keys"))
    assert shared_salt(keyed) not in (None, by_all[0])


COORDINATOR = CoordinatorOptions(endpoint="tcp://127.0.0.1:5700")


def deployment(**options: Any) -> Deployment:
    return Deployment(model="smollm2", instances=[], **options)
