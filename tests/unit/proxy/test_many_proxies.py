"""Proxies for which a coordinator decides: what clients see when one is lost, or lies."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from chosen_ports import free_port
from coordinated_cluster import Coordinated, coordinated_cluster, link_of
from coordinating import RECORD
from scripted_cluster import PROMPT, Cluster, until
from tokenizers import Tokenizer

from predictor.live.zmq_sockets import create_keys
from rescheduler.coordination.coordinated_cluster import instances_digest
from rescheduler.coordination.messages import MOST_REQUESTS, Failure, Notice, Report, decode, encode
from rescheduler.coordinator.coordinator import Coordinator
from rescheduler.engines.deployment import DeploymentError
from rescheduler.proxy.proxy import Proxy

SHORT = {"model": "m", "prompt": PROMPT, "max_tokens": 5}


def streams(cluster: Cluster, n: int, tokens: int = 400) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(cluster.answered(tokens)) for _ in range(n)]


def generating(it: Coordinated) -> int:
    """How many requests the coordinator knows to generate tokens."""
    return sum(
        mirror.generating
        for instance in it.coordinator.cluster.all
        for mirror in it.coordinator.cluster.placements.on(instance)
    )


async def test_the_coordinator_places_what_all_proxies_ask_for(many: Coordinated) -> None:
    first, second = many.proxies
    with many.unhurried():
        tasks = [*streams(first, 3), *streams(second, 3)]
        await until(lambda: generating(many) == 6)
        assert len(many.coordinator.sessions) == 2
        assert {many.load("decode-0"), many.load("decode-1")} in ({3}, {2, 4})
    await asyncio.gather(*tasks)
    await until(lambda: many.load("decode-0") + many.load("decode-1") == 0)


@pytest.mark.cluster(prefix_caching=False)
async def test_draining_moves_the_requests_of_every_proxy(many: Coordinated) -> None:
    first, second = many.proxies
    with many.unhurried():
        tasks = [*streams(first, 2), *streams(second, 2)]
        await until(lambda: generating(many) == 4)
        status, _ = await many.ask("POST", "drain/decode-0")
        assert status == 200
        await until(lambda: many.load("decode-0") == 0)
        assert many.load("decode-1") == 4, "none has ended meanwhile"
        assert all(one.proxy.cluster.instances["decode-0"].draining for one in many.proxies)
        await until(lambda: b'outcome="moved"' in many.coordinator.metrics.text())
    await asyncio.gather(*tasks)
    status, listed = await many.ask("POST", "undrain/decode-0")
    assert (status, listed["draining"]) == (200, False)
    await until(lambda: not second.proxy.cluster.instances["decode-0"].draining)


@pytest.mark.cluster(
    prefix_caching=False, migration={"name": "star", "prediction": False, "interval_seconds": 0.1}
)
async def test_the_planner_moves_requests_of_different_proxies(many: Coordinated) -> None:
    with many.unhurried():
        await many.ask("POST", "drain/decode-1")
        await until(lambda: many.proxies[0].proxy.cluster.instances["decode-1"].draining)
        tasks = [*streams(many.proxies[0], 2), *streams(many.proxies[1], 2)]
        await until(lambda: many.load("decode-0") == 4 and generating(many) == 4)
        await many.ask("POST", "undrain/decode-1")
        await until(lambda: many.load("decode-1") > 0)
    await asyncio.gather(*tasks)


async def test_without_the_coordinator_a_proxy_places_by_its_own_requests(
    many: Coordinated,
) -> None:
    first, _ = many.proxies
    with many.unhurried():
        await many.stop_coordinator()
        tasks = streams(first, 2)
        decodes = [many.engines["decode-0"], many.engines["decode-1"]]
        await until(lambda: all(len(engine.running) == 1 for engine in decodes))
    await asyncio.gather(*tasks)
    status, answer, _ = await first.post(SHORT)
    assert status == 200, answer
    await many.start_coordinator()


@pytest.mark.cluster(prefix_caching=False)
async def test_a_new_coordinator_learns_what_runs(many: Coordinated) -> None:
    first, second = many.proxies
    decodes = [many.engines["decode-0"], many.engines["decode-1"]]
    with many.unhurried():
        tasks = [*streams(first, 2), *streams(second, 2)]
        await until(lambda: generating(many) == 4)
        await many.stop_coordinator()
        tasks += streams(first, 1)
        await until(lambda: sum(len(engine.running) for engine in decodes) == 5)
        await many.start_coordinator()
        await many.coordinated()
        await until(lambda: generating(many) == 5)
        await many.ask("POST", "drain/decode-1")
        await until(lambda: many.load("decode-1") == 0)
        assert many.load("decode-0") == 5
    await asyncio.gather(*tasks)


@pytest.mark.slow
async def test_an_instance_drains_on_with_a_new_coordinator(many: Coordinated) -> None:
    await many.ask("POST", "drain/decode-1")
    await until(
        lambda: all(one.proxy.cluster.instances["decode-1"].draining for one in many.proxies)
    )
    await many.stop_coordinator()
    await many.start_coordinator()
    await many.coordinated()
    await until(lambda: len(many.coordinator.sessions) == 2)
    assert many.coordinator.cluster.instances["decode-1"].draining
    assert not many.coordinator.cluster.instances["decode-0"].draining
    status, listed = await many.ask("POST", "undrain/decode-1")
    assert (status, listed["draining"]) == (200, False)
    await until(
        lambda: not any(one.proxy.cluster.instances["decode-1"].draining for one in many.proxies)
    )


async def test_what_a_lost_proxy_had_is_forgotten(many: Coordinated) -> None:
    first, second = many.proxies
    with many.unhurried():
        tasks = streams(second, 2)
        await until(lambda: generating(many) == 2)
        many.proxies.remove(second)
        await second.proxy.close()  # it says nothing more, as if its machine were lost
        await until(lambda: len(many.coordinator.sessions) == 1)
        assert many.load("decode-0") + many.load("decode-1") == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await second.listeners.close()
    await first.answered(5)
    third = await many.start_proxy()
    await many.coordinated()
    await third.answered(5)


@pytest.mark.cluster(proxies=1)
async def test_a_proxy_with_other_instances_is_refused_and_serves_by_itself(
    many: Coordinated,
) -> None:
    fewer = [one for one in many.deployment.instances if one.name != "decode-1"]
    other = msgspec.structs.replace(many.deployment, instances=fewer)
    whole, many.deployment = many.deployment, other
    stranger = await many.start_proxy()
    await until(lambda: link_of(stranger).refused is not None)
    assert "lists other instances" in link_of(stranger).refused
    assert len(many.coordinator.sessions) == 1
    await stranger.answered(5)
    many.deployment = whole


async def test_the_conversation_is_encrypted_with_keys(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    create_keys(tmp_path / "keys")
    async with coordinated_cluster(tokenizer, free_port(), keys=tmp_path / "keys") as it:
        await asyncio.gather(*(one.answered(5) for one in it.proxies))
        (tmp_path / "others").mkdir()
        create_keys(tmp_path / "others" / "keys")
        whole = it.deployment
        it.deployment = msgspec.structs.replace(whole, keys=str(tmp_path / "others" / "keys"))
        stranger = await it.start_proxy()
        await stranger.answered(5)
        assert not link_of(stranger).alive
        assert len(it.coordinator.sessions) == 2
        it.deployment = whole


@pytest.mark.cluster(prefill_concurrency=1)
async def test_a_client_that_leaves_while_it_waits_leaves_nothing(many: Coordinated) -> None:
    many.engines["prefill-0"].answers_late = True
    tasks = [*streams(many.proxies[0], 2, 5), *streams(many.proxies[1], 2, 5)]
    await until(lambda: many.coordinator.cluster.dispatcher.waiting_for_prefill == 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not many.coordinator.cluster.dispatcher.waiting_for_prefill)
    await until(lambda: many.load("prefill-0") == 0)
    many.engines["prefill-0"].answers_late = False
    await many.proxies[0].answered(5)


# A busy machine may not have proxies decide alone: each has a pool of its own then.
@pytest.mark.cluster(prefill_concurrency=1, pool=2, lost_seconds=60.0, silent_seconds=60.0)
async def test_a_pool_that_is_full_refuses_whatever_proxy_is_asked(many: Coordinated) -> None:
    many.engines["prefill-0"].answers_late = True
    tasks = streams(many.proxies[0], 1, 5)
    await until(lambda: len(many.engines["prefill-0"].bodies) == 1)
    # All are one account, of one address: another one would be let in.
    tasks += [*streams(many.proxies[0], 1, 5), *streams(many.proxies[1], 1, 5)]
    await until(lambda: many.coordinator.cluster.dispatcher.waiting_for_prefill == 2)
    status, answer, headers = await many.proxies[1].post(SHORT)
    assert status == 429, answer
    assert int(headers["Retry-After"]) > 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    many.engines["prefill-0"].answers_late = False


@pytest.mark.parametrize("most", [10**30, -(10**30)])
async def test_a_number_that_fits_no_message_leaves_the_coordinator_in_charge(
    many: Coordinated, most: int
) -> None:
    first, second = many.proxies
    with many.unhurried():
        odd = asyncio.create_task(first.stream({"prompt": PROMPT, "max_tokens": most}))
        tasks = [*streams(first, 2), *streams(second, 2)]
        await until(lambda: generating(many) >= 4)
        odd.cancel()
        await asyncio.gather(odd, return_exceptions=True)
    await asyncio.gather(*tasks)
    await many.coordinated()
    assert len(many.coordinator.sessions) == 2


@pytest.mark.cluster(proxies=1)
async def test_a_deployment_without_a_coordinator_has_none(
    tokenizer: Tokenizer, many: Coordinated
) -> None:
    alone = msgspec.structs.replace(many.deployment, coordinator=None)
    with pytest.raises(DeploymentError, match="the deployment has none"):
        Coordinator(alone)
    proxy = Proxy(alone, tokenizer)
    assert proxy.drainer is not None
    await proxy.close()


@pytest.mark.cluster(decodes=1, token_seconds=0.5, silent_seconds=10.0)
async def test_a_prompt_of_another_proxy_may_take_its_time(many: Coordinated) -> None:
    """A proxy that does not know of it does not take the engine for one that hangs."""
    engine, (first, second) = many.engines["decode-0"], many.proxies
    engine.queue_seconds, engine.says = 3.0, {"steps": 7, "waiting": 1, "running": 0}
    asked = {"prompt": list(range(1000, 2000)), "max_tokens": 5, "n": 2}
    asking = asyncio.create_task(second.stream(asked))
    await until(lambda: bool(engine.running))
    while not asking.done():
        assert first.proxy.cluster.instances["decode-0"].breaker.closed
        await asyncio.sleep(0.01)
    engine.says = {}
    await asking


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
    many: Coordinated, routing_id: bytes | None
) -> None:
    first, _ = many.proxies
    async with peer(many, link_of(first).session, routing_id=routing_id) as liar:
        for whole in (False, True):
            await liar.says(2**40, whole=whole)
        await until(lambda: refused(many, "session") >= 2)
        await is_decided_for(many, first)
    assert len(many.coordinator.sessions) == 2


async def test_a_connection_speaks_for_one_proxy_only(many: Coordinated) -> None:
    async with peer(many) as liar:
        await liar.says(1, whole=True)
        await until(lambda: len(many.coordinator.sessions) == 3)
        for i in range(20):
            await liar.says(i, session=f"another-{i}", whole=True)
        await until(lambda: refused(many, "session") == 20)
        assert len(many.coordinator.sessions) == 3


@pytest.mark.cluster(lost_seconds=60.0)
async def test_a_proxy_comes_back_on_another_connection(many: Coordinated) -> None:
    async with peer(many) as before:
        await before.says(1, whole=True, records=[RECORD])
        await until(lambda: "peer" in many.coordinator.sessions)
        session = many.coordinator.sessions["peer"]
        await until(lambda: len(session.mirrors) == 1)
    await until(lambda: session.peer is None)
    async with peer(many) as after:
        await after.says(2)
        await until(lambda: session.peer is not None)
        await after.hears()
        assert len(session.mirrors) == 1
    many.coordinator.sessions["peer"].heard_at = float("-inf")


async def test_a_number_far_ahead_is_not_the_last_that_is_heard(many: Coordinated) -> None:
    async with peer(many) as odd:
        await odd.says(1, whole=True)
        await until(lambda: "peer" in many.coordinator.sessions)
        await odd.says(2**40)
        await until(lambda: refused(many, "number") == 1)
        while not (await odd.hears()).whole_please:
            pass
        await odd.says(2, whole=True, records=[RECORD])
        await until(lambda: len(many.coordinator.sessions["peer"].mirrors) == 1)
        await odd.says(2**40, whole=True)
        await until(lambda: not many.coordinator.sessions["peer"].mirrors)
        await odd.says(3)
        while not (await odd.hears()).whole_please:
            pass
        await odd.says(4, whole=True, records=[RECORD])
        await until(lambda: len(many.coordinator.sessions["peer"].mirrors) == 1)


@pytest.mark.cluster(proxies=1)
async def test_there_are_so_many_proxies_and_no_more(many: Coordinated) -> None:
    peers = [Peer(many, f"peer-{i}") for i in range(70)]
    try:
        for one in peers:
            await one.says(1, whole=True)
        await until(lambda: refused(many, "full") == 7)
        assert len(many.coordinator.sessions) == 64
        await is_decided_for(many, many.proxies[0])
    finally:
        for one in peers:
            one.close()


@pytest.mark.cluster(proxies=1, lost_seconds=60.0)
async def test_others_have_their_turn_while_a_large_report_is_read(many: Coordinated) -> None:
    async with peer(many) as large:
        replace, seen = msgspec.structs.replace, set[int]()
        for number, records in ((1, MOST_REQUESTS), (2, 0)):
            runs = [replace(RECORD, handle=i, instance=1, destination=1) for i in range(records)]
            await large.says(number, whole=True, records=runs)
            while many.load("decode-0") != records:
                seen.add(many.load("decode-0"))
                await asyncio.sleep(0)
        assert len(seen) > 2 * MOST_REQUESTS // 1_000


@pytest.mark.cluster(proxies=1, pool=8, prefill_concurrency=1)
async def test_what_one_peer_asks_for_leaves_room_for_what_others_ask_for(
    many: Coordinated,
) -> None:
    async with peer(many) as greedy:
        many.engines["prefill-0"].answers_late = True
        replace = msgspec.structs.replace
        asked = [
            replace(RECORD, handle=i, ticket=i, for_prefill=True, hop=i % 2 - 1)
            for i in range(1, 200)
        ]
        await greedy.says(1, whole=True, records=asked)
        dispatcher = many.coordinator.cluster.dispatcher
        await until(lambda: dispatcher.waiting_for_prefill >= 7)
        stream = asyncio.create_task(many.proxies[0].answered(5))
        own = link_of(many.proxies[0]).session
        await until(lambda: any(one.session == own for one in dispatcher._pool.for_prefill))
        assert dispatcher.waiting_for_prefill <= 16, "no more than the pool, and the share of each"
        await greedy.says(2, whole=True)
        many.engines["prefill-0"].answers_late = False
        await stream


@pytest.mark.cluster(breaker_seconds=60.0)
async def test_the_word_of_a_proxy_leaves_half_of_the_instances_in_service(
    many: Coordinated,
) -> None:
    async with peer(many) as liar:
        failures = [Failure(instance, True) for instance in (1, 2) for _ in range(5)]
        await liar.says(1, whole=True, failures=failures)
        decodes = [many.coordinator.cluster.instances[name] for name in ("decode-0", "decode-1")]
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


async def test_what_cannot_be_is_left_out_and_counted(many: Coordinated) -> None:
    async with peer(many) as odd:
        for number, what in enumerate(CANNOT_BE, 1):
            await odd.says(number, whole=True, **what)
            await until(lambda expected=number: refused(many, "content") == expected)
            assert not many.coordinator.sessions["peer"].mirrors
        await is_decided_for(many, many.proxies[0])


async def test_nobody_goes_first_by_saying_that_it_has_waited_for_days(many: Coordinated) -> None:
    """A request has waited at most since its proxy was first heard of."""
    async with peer(many) as odd:

        def mirrors() -> list[Any]:
            return list(many.coordinator.sessions["peer"].mirrors.values())

        began = asyncio.get_running_loop().time()
        waits = msgspec.structs.replace(RECORD, ticket=1, waited=1e6, generated_tokens=2**24)
        await odd.says(1, whole=True, records=[waits])
        await until(lambda: "peer" in many.coordinator.sessions and bool(mirrors()))
        (mirror,) = mirrors()
        assert mirror.arrived >= began
        assert mirror.generated_tokens <= 100_000, "no engine gives more"
        runs = msgspec.structs.replace(waits, instance=1, destination=1, hop=0, generating=True)
        await odd.says(2, records=[runs])
        handles, tokens = (np.array([n], dtype=np.int64).tobytes() for n in (1, 2**24))
        await odd.says(3, handles=handles, tokens=tokens)
        await is_decided_for(many, many.proxies[0])
        assert mirror.generated_tokens <= 100_000


async def test_a_step_that_takes_no_time_stops_nobody(many: Coordinated) -> None:
    async with peer(many) as odd:
        await odd.says(1, whole=True, records=[RECORD], step_seconds=5e-324)
        await until(lambda: many.coordinator.cluster.step.seconds <= 1e-3)
        await is_decided_for(many, many.proxies[0])


async def test_an_outcome_that_nobody_knows_is_no_label(many: Coordinated) -> None:
    async with peer(many) as odd:
        runs = msgspec.structs.replace(
            RECORD, instance=1, destination=1, hop=0, can_move=True, generating=True
        )
        await odd.says(1, whole=True, records=[runs])
        await until(lambda: many.load("decode-0") == 1)
        await many.ask("POST", "drain/decode-0")
        while not (notice := await odd.hears()).moves:
            pass
        move = {"handle": 1, "hop": notice.moves[0].hop, "outcome": "made_up"}
        await odd.says(2, moves=[list(move.values())], records=[runs])
        await until(lambda: b'outcome="other"' in many.coordinator.metrics.text())
        assert b"made_up" not in many.coordinator.metrics.text()
        await many.ask("POST", "undrain/decode-0")
