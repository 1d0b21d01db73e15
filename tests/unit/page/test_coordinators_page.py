"""The page of a coordinator: the requests of all of its proxies."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from chosen_ports import free_port
from coordinated_cluster import Coordinated, coordinated_cluster
from scripted_cluster import PROMPT
from tokenizers import Tokenizer
from watched_page import Stream, stream

from rescheduler.page.snapshot import About, Phase, Snapshot

LONG = {"prompt": PROMPT, "max_tokens": 400}


@pytest.fixture
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@asynccontextmanager
async def watching(it: Coordinated) -> AsyncIterator[Stream]:
    async with stream(it.admin.url, it.admin.token) as read:
        kind, data = await read.event()
        assert kind == "about"
        about = msgspec.json.decode(data, type=About)
        assert (about.source, about.title, about.migration) == ("proxy", "m", "")
        yield read


async def seen(read: Stream, condition: Callable[[Snapshot], bool]) -> Snapshot:
    """Return the first snapshot that meets a condition."""
    async with asyncio.timeout(60):
        while not condition(snapshot := await read.snapshot()):
            pass
    return snapshot


def decoding(snapshot: Snapshot) -> int:
    return snapshot.requests.phase.count(Phase.DECODING)


async def test_it_shows_the_requests_of_every_proxy_and_the_pauses_of_moves(
    tokenizer: Tokenizer,
) -> None:
    async with coordinated_cluster(tokenizer, free_port(), prefix_caching=False) as it:
        with it.unhurried():
            tasks = [
                asyncio.create_task(proxy.stream({**LONG, "prompt": f"{PROMPT} {i}"}))
                for proxy in it.proxies
                for i in range(2)
            ]
            async with watching(it) as read:
                before = await seen(read, lambda one: decoding(one) == 4)
                assert_whole(before)
                status, _ = await it.ask("POST", "drain/decode-0")
                assert status == 200
                after = await seen(read, lambda one: len(one.moves) == 2)
        await asyncio.gather(*tasks)
    names = dict(zip(before.requests.number, before.requests.name, strict=True))
    for move in after.moves:
        assert (move.source, move.target) == ("decode-0", "decode-1")
        assert (move.outcome, move.reason) == ("moved", "drain")
        assert move.pause is not None and move.pause > 0 and move.tokens > 0
        assert names[move.number] == move.name
    (drained,) = [one for one in after.instances if one.draining]
    assert (drained.name, drained.kv_tokens) == ("decode-0", 0)


def assert_whole(snapshot: Snapshot) -> None:
    """Assert that instances hold what their requests do, each of which has its number."""
    columns = snapshot.requests
    assert len(set(columns.number)) == 4
    held = dict.fromkeys(range(len(snapshot.instances)), 0)
    rows = zip(columns.instance, columns.prompt, columns.generated, strict=True)
    for on, prompt, generated in rows:
        assert prompt > 1
        held[on] += prompt + generated
    assert [one.kv_tokens for one in snapshot.instances] == list(held.values())
    decodes = [one.name for one in snapshot.instances if one.role == "decode"]
    assert decodes == ["decode-0", "decode-1"]


@pytest.mark.slow
async def test_a_new_coordinator_shows_what_proxies_report(tokenizer: Tokenizer) -> None:
    async with coordinated_cluster(tokenizer, free_port()) as it:
        with it.unhurried():
            tasks = [asyncio.create_task(proxy.stream(LONG)) for proxy in it.proxies]
            async with watching(it) as read:
                await seen(read, lambda one: decoding(one) == 2)
                await it.stop_coordinator()
            await it.start_coordinator()
            async with watching(it) as read:
                await seen(read, lambda one: decoding(one) == 2)
        await asyncio.gather(*tasks)
