"""A peer with the shared keys that lies: what others see of it, and what they do not."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from coordinated_cluster import Coordinated, Make, link_of
from coordinating import RECORD
from scripted_cluster import Cluster, until

from rescheduler.coordination.coordinated_cluster import instances_digest
from rescheduler.coordination.messages import (
    MOST_REQUESTS,
    Failure,
    Notice,
    Report,
    decode,
    encode,
)


class Peer:
    """A connection to the coordinator, as anyone with the keys can make one."""

    def __init__(self, it: Coordinated, session: str, routing_id: bytes | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if routing_id is not None:
            self._socket.setsockopt(zmq.ROUTING_ID, routing_id)
        self._socket.connect(it.coordinator.endpoint)
        self._said = Report(session, 0, "", 0, instances_digest(it.deployment))

    async def says(self, number: int, **what: Any) -> None:
        report = msgspec.structs.replace(self._said, number=number, **what)
        await self._socket.send_multipart(encode(report))

    async def hears(self) -> Notice:
        return decode(await self._socket.recv_multipart(), Notice)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@asynccontextmanager
async def peer(it: Coordinated, session: str = "peer", **more: Any) -> AsyncIterator[Peer]:
    made = Peer(it, session, **more)
    try:
        yield made
    finally:
        made.close()


def refused(it: Coordinated, reason: str) -> float:
    name = "headway_coordinator_refused_messages_total"
    pattern = rf'{name}{{reason="{reason}",sender="proxy"}} (\S+)'
    (count,) = re.findall(pattern, it.coordinator.metrics.text().decode())
    return float(count)


async def is_decided_for(it: Coordinated, cluster: Cluster) -> None:
    """The coordinator has placed a request of a proxy, and knows that it runs."""
    before = it.load("decode-0") + it.load("decode-1")
    with it.unhurried():
        stream = asyncio.create_task(cluster.answered(400))
        await until(lambda: it.load("decode-0") + it.load("decode-1") == before + 1)
    await stream
    await it.coordinated()


@pytest.mark.parametrize("routing_id", [None, b"mine"])
async def test_a_report_in_the_name_of_another_proxy_is_ignored(
    coordinated: Make, routing_id: bytes | None
) -> None:
    async with coordinated() as it:
        first, _ = it.proxies
        async with peer(it, link_of(first).session, routing_id=routing_id) as liar:
            for whole in (False, True):
                await liar.says(2**40, whole=whole)
            await until(lambda: refused(it, "session") >= 2)
            await is_decided_for(it, first)
        assert len(it.coordinator.sessions) == 2


async def test_a_connection_speaks_for_one_proxy_only(coordinated: Make) -> None:
    async with coordinated() as it, peer(it) as liar:
        await liar.says(1, whole=True)
        await until(lambda: len(it.coordinator.sessions) == 3)
        for i in range(20):
            await liar.says(i, session=f"another-{i}", whole=True)
        await until(lambda: refused(it, "session") == 20)
        assert len(it.coordinator.sessions) == 3


async def test_a_proxy_comes_back_on_another_connection(coordinated: Make) -> None:
    async with coordinated(lost_seconds=60.0) as it:
        async with peer(it) as before:
            await before.says(1, whole=True, records=[RECORD])
            await until(lambda: "peer" in it.coordinator.sessions)
            session = it.coordinator.sessions["peer"]
            await until(lambda: len(session.mirrors) == 1)
        await until(lambda: session.peer is None)
        async with peer(it) as after:
            await after.says(2)
            await until(lambda: session.peer is not None)
            await after.hears()
            assert len(session.mirrors) == 1
        it.coordinator.sessions["peer"].heard_at = float("-inf")


async def test_a_number_far_ahead_is_not_the_last_that_is_heard(coordinated: Make) -> None:
    async with coordinated() as it, peer(it) as odd:
        await odd.says(1, whole=True)
        await until(lambda: "peer" in it.coordinator.sessions)
        await odd.says(2**40)
        await until(lambda: refused(it, "number") == 1)
        while not (await odd.hears()).whole_please:
            pass
        await odd.says(2, whole=True, records=[RECORD])
        await until(lambda: len(it.coordinator.sessions["peer"].mirrors) == 1)
        await odd.says(2**40, whole=True)
        await until(lambda: not it.coordinator.sessions["peer"].mirrors)
        await odd.says(3)
        while not (await odd.hears()).whole_please:
            pass
        await odd.says(4, whole=True, records=[RECORD])
        await until(lambda: len(it.coordinator.sessions["peer"].mirrors) == 1)


async def test_there_are_so_many_proxies_and_no_more(coordinated: Make) -> None:
    async with coordinated(proxies=1) as it:
        peers = [Peer(it, f"peer-{i}") for i in range(70)]
        try:
            for one in peers:
                await one.says(1, whole=True)
            await until(lambda: refused(it, "full") == 7)
            assert len(it.coordinator.sessions) == 64
            await is_decided_for(it, it.proxies[0])
        finally:
            for one in peers:
                one.close()


async def test_others_have_their_turn_while_a_large_report_is_read(coordinated: Make) -> None:
    async with coordinated(proxies=1, lost_seconds=60.0) as it, peer(it) as large:
        replace, seen = msgspec.structs.replace, set[int]()
        for number, records in ((1, MOST_REQUESTS), (2, 0)):
            runs = [replace(RECORD, handle=i, instance=1, destination=1) for i in range(records)]
            await large.says(number, whole=True, records=runs)
            while it.load("decode-0") != records:
                seen.add(it.load("decode-0"))
                await asyncio.sleep(0)
        assert len(seen) > 2 * MOST_REQUESTS // 1_000


async def test_what_one_peer_asks_for_leaves_room_for_what_others_ask_for(
    coordinated: Make,
) -> None:
    async with coordinated(proxies=1, pool=8, prefill_concurrency=1) as it, peer(it) as greedy:
        it.engines["prefill-0"].answers_late = True
        replace = msgspec.structs.replace
        asked = [
            replace(RECORD, handle=i, ticket=i, for_prefill=True, hop=i % 2 - 1)
            for i in range(1, 200)
        ]
        await greedy.says(1, whole=True, records=asked)
        dispatcher = it.coordinator.cluster.dispatcher
        await until(lambda: dispatcher.waiting_for_prefill >= 7)
        stream = asyncio.create_task(it.proxies[0].answered(5))
        own = link_of(it.proxies[0]).session
        await until(lambda: any(one.session == own for one in dispatcher._pool.for_prefill))
        assert dispatcher.waiting_for_prefill <= 16, "no more than the pool, and the share of each"
        await greedy.says(2, whole=True)
        it.engines["prefill-0"].answers_late = False
        await stream


async def test_the_word_of_a_proxy_leaves_half_of_the_instances_in_service(
    coordinated: Make,
) -> None:
    async with coordinated(breaker_seconds=60.0) as it, peer(it) as liar:
        failures = [Failure(instance, True) for instance in (1, 2) for _ in range(5)]
        await liar.says(1, whole=True, failures=failures)
        decodes = [it.coordinator.cluster.instances[name] for name in ("decode-0", "decode-1")]
        await until(lambda: not decodes[0].breaker.closed)
        assert decodes[1].breaker.closed


CANNOT_BE: list[dict[str, Any]] = [
    {"records": [msgspec.structs.replace(RECORD, instance=9)]},
    {"records": [msgspec.structs.replace(RECORD, avoid=[9])]},
    {"records": [msgspec.structs.replace(RECORD, avoid=[-1])]},
    {"failures": [Failure(9, True)]},
    {"handles": b"0" * 8},
    {"handles": b"\xff" * 8, "tokens": b"\xff" * 8},
]


async def test_what_cannot_be_is_left_out_and_counted(coordinated: Make) -> None:
    async with coordinated() as it, peer(it) as odd:
        for number, what in enumerate(CANNOT_BE, 1):
            await odd.says(number, whole=True, **what)
            await until(lambda expected=number: refused(it, "content") == expected)
            assert not it.coordinator.sessions["peer"].mirrors
        await is_decided_for(it, it.proxies[0])


async def test_nobody_goes_first_by_saying_that_it_has_waited_for_days(coordinated: Make) -> None:
    """A request has waited at most since its proxy was first heard of."""
    async with coordinated() as it, peer(it) as odd:

        def mirrors() -> list[Any]:
            return list(it.coordinator.sessions["peer"].mirrors.values())

        began = asyncio.get_running_loop().time()
        waits = msgspec.structs.replace(RECORD, ticket=1, waited=1e6, generated_tokens=2**24)
        await odd.says(1, whole=True, records=[waits])
        await until(lambda: "peer" in it.coordinator.sessions and bool(mirrors()))
        (mirror,) = mirrors()
        assert mirror.arrived >= began
        assert mirror.generated_tokens <= 100_000, "no engine gives more"
        runs = msgspec.structs.replace(waits, instance=1, destination=1, hop=0, generating=True)
        await odd.says(2, records=[runs])
        handles, tokens = (np.array([n], dtype=np.int64).tobytes() for n in (1, 2**24))
        await odd.says(3, handles=handles, tokens=tokens)
        await is_decided_for(it, it.proxies[0])
        assert mirror.generated_tokens <= 100_000


async def test_a_step_that_takes_no_time_stops_nobody(coordinated: Make) -> None:
    async with coordinated() as it, peer(it) as odd:
        await odd.says(1, whole=True, records=[RECORD], step_seconds=5e-324)
        await until(lambda: it.coordinator.cluster.step.seconds <= 1e-3)
        await is_decided_for(it, it.proxies[0])


async def test_an_outcome_that_nobody_knows_is_no_label(coordinated: Make) -> None:
    async with coordinated() as it, peer(it) as odd:
        runs = msgspec.structs.replace(
            RECORD, instance=1, destination=1, hop=0, can_move=True, generating=True
        )
        await odd.says(1, whole=True, records=[runs])
        await until(lambda: it.load("decode-0") == 1)
        await it.ask("POST", "drain/decode-0")
        while not (notice := await odd.hears()).moves:
            pass
        move = {"handle": 1, "hop": notice.moves[0].hop, "outcome": "made_up"}
        await odd.says(2, moves=[list(move.values())], records=[runs])
        await until(lambda: b'outcome="other"' in it.coordinator.metrics.text())
        assert b"made_up" not in it.coordinator.metrics.text()
        await it.ask("POST", "undrain/decode-0")
