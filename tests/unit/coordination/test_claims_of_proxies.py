"""What a proxy says of its requests counts within what can be: others do not pay for a lie."""

import asyncio
from typing import Any

import pytest
from coordinating import RECORD, shared_by_sessions
from msgspec.structs import replace

from rescheduler.coordination.messages import Record, Report
from rescheduler.coordinator.session import Session
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.placement.instance_state import InstanceState


class Coordinator:
    """Its end, with an instance and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tasks: set[asyncio.Task[None]] = set()
        described = Instance("decode-0", "decode", "http://decode-0:1")
        instance = InstanceState(described, ProxyOptions(), None)
        self.shared = shared_by_sessions(
            "c", [instance], ProxyOptions(), lambda: self.now, self.background
        )

    def background(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

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
    assert list(followed.values()) == list(sessions[1 - first].mirrors.values())
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
