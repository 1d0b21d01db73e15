"""Both ends of the conversation of proxies and coordinator, of which the other may lie."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from coordinating import RECORD, shared_by_sessions
from live_requests import instance_state, live_request
from msgspec.structs import replace

from benchmarks.support.engine_states import engine_state
from rescheduler.coordination.coordinated_cluster import WatchedPlacements
from rescheduler.coordination.link import Link
from rescheduler.coordination.messages import (
    MOST,
    MOST_FAILURES,
    MOST_REQUESTS,
    Answer,
    CoordinationError,
    Ended,
    Failure,
    MoveEnded,
    MoveOrder,
    Notice,
    Record,
    Refusal,
    RefusedMessages,
    Report,
    View,
    decode,
    encode,
)
from rescheduler.coordinator.coordinator import Sessions
from rescheduler.coordinator.session import Session
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.placement.account import Account
from rescheduler.placement.live_request import LiveRequest
from rescheduler.step_time.profile import MeanStepTime

POOL = 4


class Coordinator:
    """Its end when it has just started, with an instance that runs one request at a time."""

    def __init__(self, prefills: bool = False) -> None:
        self.now = 0.0
        options = ProxyOptions(pool=POOL)
        instance = instance_state("d", options=options)
        instance.engine = engine_state(max_num_seqs=1)
        instances = [instance]
        if prefills:
            instances.append(instance_state("p", "prefill", options))
        background = asyncio.get_running_loop().create_task
        self.shared = shared_by_sessions("c", instances, options, lambda: self.now, background)

    def session(self, number: int) -> Session:
        return Session(f"s{number}", number, b"peer", None, self.shared)


def report(number: int, *records: Record) -> Report:
    return Report("s", number, "c/1", 0, "digest", whole=True, records=list(records))


async def test_a_request_has_waited_no_longer_than_its_proxy_is_known() -> None:
    it = Coordinator()
    honest = it.session(1)
    await honest.receive(report(1, replace(RECORD, waited=0.0)))
    it.now = 5.0
    lying = it.session(2)
    await lying.receive(report(1, replace(RECORD, waited=1e6, generated_tokens=2**24)))
    assert lying.mirrors[1].arrived == 5.0 > honest.mirrors[1].arrived
    assert lying.mirrors[1].generated_tokens <= 2**24


@pytest.mark.parametrize("first", [0, 1])
async def test_requests_of_one_name_are_forgotten_in_whatever_order_they_end(first: int) -> None:
    it = Coordinator()
    sessions = [it.session(1), it.session(2)]
    for session in sessions:
        await session.receive(report(1, RECORD))
    followed = it.shared.cluster.forecasts._running
    assert len(followed) == 1
    await sessions[first].receive(report(2))
    assert [mirror for running in followed.values() for mirror in running] == list(
        sessions[1 - first].mirrors.values()
    )
    await sessions[1 - first].receive(report(2))
    assert not followed and not it.shared.names


async def test_a_long_prompt_is_charged_as_its_engine_counted_it() -> None:
    it = Coordinator()
    session = it.session(1)
    await session.receive(report(1, replace(RECORD, prompt_tokens=16_000, prompt_is_known=True)))
    accounts = it.shared.cluster.accounts
    assert accounts.service(session.mirrors[1]) == 16_000
    await session.receive(report(2, replace(RECORD, prompt_tokens=4_000_000)))
    assert accounts.service(session.mirrors[1]) == 16_000, "no estimate replaces a count"
    several = replace(RECORD, handle=2, several=True, answers=64)
    await session.receive(report(3, several))
    assert session.mirrors[2].answers == 64


async def test_a_proxy_corrects_nobodys_forecasts_by_more_than_answers_can_have() -> None:
    coordinator = Coordinator()
    session = coordinator.session(1)
    record = replace(
        RECORD, instance=0, destination=0, hop=0, account="victim", answers=2, several=True
    )
    await session.receive(report(1, record))
    session.mirrors[1].foreseen_tokens = 100.0
    await session.receive(replace(report(2, record), ended=[Ended(1, True, 10**7)]))
    longest = coordinator.shared.cluster.all[0].engine.max_model_len  # type: ignore[union-attr]
    victim = coordinator.shared.cluster.accounts.named("victim")
    assert victim._error <= math.log(longest / 100.0) + 1e-9


async def test_a_proxy_charges_nobody_more_than_answers_can_have() -> None:
    coordinator = Coordinator()
    session = coordinator.session(1)
    record = replace(RECORD, instance=0, destination=0, hop=0, account="victim", answers=2)
    await session.receive(report(1, record))
    ended = Ended(1, True, 10, counted=2.0**40)
    await session.receive(replace(report(2), ended=[ended], records=[record]))
    longest = coordinator.shared.cluster.all[0].engine.max_model_len  # type: ignore[union-attr]
    victim = coordinator.shared.cluster.accounts.named("victim")
    assert 0 < victim.served(victim_group(victim)) <= 2 * 3 * longest


@pytest.mark.parametrize(
    ("record", "ended", "factors"),
    [
        ({}, Ended(1, True, 40, length_forecasts={"past": 10, "both": 20}), ([4.0], [2.0])),
        ({}, Ended(1, False, 40, length_forecasts={"past": 10}), ([], [])),
        ({}, Ended(1, True, 40), ([], [])),
        ({"max_tokens": 40}, Ended(1, True, 40, length_forecasts={"past": 10}), ([], [])),
        ({}, Ended(1, True, 2**24, length_forecasts={"past": 10}), ([], [])),
    ],
)
async def test_forecasts_on_arrival_are_judged_by_answers_that_ended_by_themselves(
    record: dict[str, Any], ended: Ended, factors: tuple[list[float], list[float]]
) -> None:
    it = Coordinator()
    session = it.session(1)
    await session.receive(report(1, replace(RECORD, **{"max_tokens": None, **record})))
    for number in (2, 3):  # and once
        await session.receive(replace(report(number), ended=[ended]))
    latest = it.shared.cluster.length_factors.latest
    assert (list(latest["past"]), list(latest["both"])) == factors
    assert not session.mirrors


def victim_group(account: Account) -> Any:
    return next(iter(account.settled))


async def test_a_proxy_cannot_fill_the_table_of_accounts() -> None:
    it = Coordinator()
    honest, lying = it.session(1), it.session(2)
    await honest.receive(report(1, replace(RECORD, account="tenant")))
    idle = it.shared.cluster.accounts.named("idle")
    records = [replace(RECORD, handle=i, account=f"invented-{i}") for i in range(1, 2_000)]
    await lying.receive(report(1, *records))
    names = {mirror.account.name for mirror in lying.mirrors.values()}
    assert len(names) == 257 and "proxy-2" in names
    assert it.shared.cluster.accounts.named("idle") is idle, "it is not forgotten"
    await honest.receive(report(2, *(replace(RECORD, handle=i, account="new") for i in (1, 2))))
    assert honest.mirrors[2].account.name == "new", "there is room for those of others"
    await lying.receive(report(2))
    assert not lying._accounts


RUNS = replace(RECORD, instance=0, destination=0, hop=0, generating=True)


@pytest.mark.parametrize(("decodes", "paid"), [(False, 400), (True, 400 + 2 * 1000)])
async def test_who_gives_up_before_a_place_to_decode_pays_for_its_prompt(
    decodes: bool, paid: float
) -> None:
    it = Coordinator(prefills=True)
    session, others = it.session(1), it.session(2)
    if not decodes:
        await others.receive(report(1, RUNS))
    asks = replace(RECORD, account="a", prompt_tokens=400, prompt_is_known=True, max_tokens=1000)
    await session.receive(report(1, replace(asks, ticket=1, for_prefill=True)))
    mirror = session.mirrors[1]
    mirror.foreseen_tokens = 1000.0
    for number in (2, 3):
        await asyncio.sleep(0.01)
        assert sum(mirror.account.charges.values()) == 400 + 2 * 1000
        await session.receive(report(number, replace(asks, ticket=2)))
    assert (mirror.instance is it.shared.cluster.all[0]) == decodes
    await session.receive(report(4))
    assert list(mirror.account.settled.values()) == [paid]
    await others.close()


PAYS = replace(RUNS, account="a", prompt_tokens=4_000, prompt_is_known=True, max_tokens=1_000)


def paid(it: Coordinator) -> float:
    return sum(it.shared.cluster.accounts.named("a").settled.values())


async def test_what_is_forgotten_and_reported_anew_is_paid_once() -> None:
    it = Coordinator()
    session = it.session(1)
    for number in range(1, 5):
        await session.receive(report(number, replace(PAYS, generated_tokens=100 * number)))
        assert session.mirrors[1].account.charges and paid(it) == 0.0
        await session.forget_all()
        assert paid(it) == 4_000 + 2 * 100 * number, "it may be gone"
    await session.receive(report(5, replace(PAYS, generated_tokens=1_000)))
    await session.receive(report(6))
    assert paid(it) == 4_000 + 2 * 1_000 and not session.forgotten
    await session.receive(report(7, PAYS))
    await session.forget_all()
    await session.receive(report(8))
    await session.receive(report(9, PAYS))
    assert paid(it) == 2 * 4_000 + 2 * 1_000, "what had ended is not taken back"
    await session.close()


@pytest.mark.parametrize("returns", [True, False])
async def test_a_proxy_that_is_silent_for_long_pays_once(returns: bool) -> None:
    it = Coordinator()
    sessions = Sessions(it.shared, "digest", 10.0, RefusedMessages("refused", "proxy"))

    async def hears(said: Report, peer: bytes) -> None:
        assert await sessions.receive(said, peer, None) is None

    await hears(report(1, replace(PAYS, generated_tokens=500)), b"one")
    it.now = 11.0
    assert [each async for each in sessions.notices(beat=True)] == []
    assert paid(it) == 4_000 + 2 * 500
    if returns:
        await hears(report(2, replace(PAYS, generated_tokens=600)), b"two")
        assert paid(it) == 0.0
        await hears(report(3), b"two")
        assert paid(it) == 4_000 + 2 * 600


class Proxy:
    """What a proxy says, and how many of its requests were refused."""

    def __init__(self, coordinator: Coordinator, number: int) -> None:
        self._shared, self.session = coordinator.shared, coordinator.session(number)
        self._reports = self._handles = self.refused = 0

    async def says(self, *records: Record, whole: bool = False) -> None:
        self._reports += 1
        whole = whole or self._reports == 1
        report = Report(self.session.name, self._reports, "", 0, "digest", whole, list(records))
        await self.session.receive(report)
        for _ in range(5):
            await asyncio.sleep(0)
        notice = self.session.notice(None)
        answers = [] if notice is None else notice.answers
        refusals = [answer.refusal for answer in answers if answer.refusal is not None]
        assert all(refusal.status == 429 for refusal in refusals)
        self.refused += len(refusals)

    async def asks(self, n: int, account: str = "", **changes: Any) -> None:
        await self.says(*(self.asking(account, **changes) for _ in range(n)))

    def asking(self, account: str = "", **changes: Any) -> Record:
        handle = self._handles = self._handles + 1
        return replace(RECORD, handle=handle, ticket=handle, account=account, **changes)

    @property
    def waiting(self) -> int:
        """How many of its requests the coordinator has waiting."""
        names = [one.session for one in self._shared.cluster.dispatcher.waiting]
        return names.count(self.session.name)

    def running(self) -> Record:
        self._handles += 1
        return replace(RUNS, handle=self._handles)


@asynccontextmanager
async def crowded() -> AsyncIterator[tuple[Proxy, Proxy]]:
    """Two proxies, and an instance without room."""
    coordinator = Coordinator()
    one, two = Proxy(coordinator, 1), Proxy(coordinator, 2)
    await one.says(one.running())
    yield one, two
    for proxy in (one, two):
        await proxy.session.close()


async def test_a_flood_of_one_account_keeps_no_other_proxys_requests_out() -> None:
    async with crowded() as (one, two):
        await one.asks(100, "flood")
        assert (one.waiting, one.refused) == (POOL, 96)
        await two.asks(3, "other")
        assert (two.waiting, two.refused) == (2, 1), "its share is half of the pool"


async def test_an_account_has_one_share_whichever_proxies_it_asks() -> None:
    async with crowded() as (one, two):
        await one.asks(POOL, "flood")
        await two.asks(2, "flood")
        assert (two.waiting, two.refused) == (0, 2)


async def test_a_proxy_that_names_no_account_is_one() -> None:
    async with crowded() as (one, two):
        await one.asks(100)
        await two.asks(3)
        assert (one.waiting, two.waiting) == (POOL, 2)


async def test_the_pool_holds_where_no_instance_prefills_for_others() -> None:
    async with crowded() as (one, _):
        prefills = [one.asking("flood", for_prefill=True) for _ in range(20)]
        await one.says(*prefills)
        assert one.refused == 0, "there is nowhere to wait"
        await one.says(*(replace(r, ticket=r.ticket + 100, for_prefill=False) for r in prefills))
        assert (one.waiting, one.refused) == (POOL, 20 - POOL)


async def test_what_has_had_a_place_waits_for_another_one_and_crowds_nobody_out() -> None:
    async with crowded() as (one, two):
        await one.asks(100, "flood", hop=0)
        assert (one.waiting, one.refused) == (POOL, 0), "the others wait before the pool"
        await two.asks(2, "other")
        assert (two.waiting, two.refused) == (2, 0)


async def test_a_coordinator_that_starts_anew_takes_what_runs_though_the_pool_is_full() -> None:
    coordinator = Coordinator()
    proxy = Proxy(coordinator, 1)
    runs, waits = [proxy.running() for _ in range(6)], [proxy.asking() for _ in range(10)]
    await proxy.says(*waits, *runs)
    (instance,) = coordinator.shared.cluster.all
    assert len(coordinator.shared.cluster.placements.on(instance)) == 6
    assert (proxy.waiting, proxy.refused) == (POOL, 10 - POOL)
    fails = replace(runs[0], ticket=100, instance=-1, destination=-1, generating=False)
    await proxy.says(fails)
    assert (proxy.waiting, proxy.refused) == (POOL + 1, 10 - POOL), "it is not refused"
    await proxy.session.close()


VIEW = View([False, False], 0)


def link() -> Link:
    instances = [instance_state(f"decode-{i}") for i in range(2)]
    step, carry_out = MeanStepTime(), cast(Any, None)
    return Link("session", instances, "digest", 1.5, lambda: 0.0, step, carry_out, lambda: None)


def arrived(on: Link, name: str) -> LiveRequest:
    return live_request(name, WatchedPlacements(on.changed), max_tokens=100)


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
    assert place.name == "decode-1"


async def test_what_is_unknown_or_not_asked_for_changes_nothing() -> None:
    conversation = link()
    order = MoveOrder(2**40, 0, 0, 1, "why")
    conversation.receive(Notice("c", 1, answers=[Answer(2**40, 0)], moves=[order], view=VIEW))
    report = conversation.report(beat=True)
    assert not report.moves


async def test_everything_is_reported_a_few_times_a_second_however_often_it_is_asked_for() -> None:
    conversation = link()
    conversation.changed(arrived(conversation, "a"))
    first = conversation.report(beat=True)
    assert first.whole
    for number in range(1, 100):
        conversation.receive(Notice("c", number, whole_please=True))
        assert conversation.report(beat=False) is None
    again = conversation.report(beat=True)
    assert again.whole


async def test_what_is_forecast_anew_is_reported_with_the_next_beat() -> None:
    conversation, request = link(), None
    for name in ("a", "b"):
        request = arrived(conversation, name)
        conversation.changed(request)
    conversation.report(beat=True)
    assert request is not None
    request.expected_tokens = 40
    assert [one.expected_tokens for one in said(conversation, beat=True).records] == [40]
    assert not said(conversation, beat=True).records


async def test_a_proxy_may_forecast_a_request_anew() -> None:
    session = Coordinator().session(1)
    for number, expected in enumerate((None, 40, 8), start=1):
        await session.receive(report(number, replace(RECORD, expected_tokens=expected)))
        assert session.mirrors[1].expected_tokens == expected


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
    return decode(encode(report), Report)


PLACED = replace(RECORD, instance=0, destination=0, hop=0)
REPORT = Report("session", 1, "", 0, "digest", records=[PLACED])
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
    *({"records": [replace(PLACED, **values)]} for values in RECORDS),
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
    {"records": [PLACED] * 16_385},
    {"ended": [Ended(1, True, 1)] * 16_385},
    {"ended": [Ended(1, True, 2**24 + 1)]},
    {"ended": [Ended(1, True, 1, length_forecasts={"past": 2**24 + 1})]},
    {"ended": [Ended(1, True, 1, length_forecasts={"past": -1})]},
    {"ended": [Ended(1, True, 1, length_forecasts={"mine": 1})]},  # type: ignore[dict-item]
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
    [*((REPORT, values) for values in REPORTS), *((NOTICE, values) for values in NOTICES)],
)
def test_one_without_sense_is_refused(message: Any, values: dict[str, Any]) -> None:
    frames = encode(replace(message, **values))
    with pytest.raises(CoordinationError, match="invalid message"):
        decode(frames, type(message))
