"""The page of a proxy or a coordinator that serves: who may see it, what it is sent, and when."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from coordinated_cluster import Coordinated
from made_up_cluster import MadeUpCluster
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer
from watched_page import TOKEN, Stream, stream

from rescheduler.engines.launch_local import free_ports
from rescheduler.page.snapshot import About, Phase, Snapshot, SnapshotFeed
from rescheduler.serving.serve import proxy_running


@asynccontextmanager
async def watching(it: Cluster | Coordinated) -> AsyncIterator[Stream]:
    admin = it.listeners.admin if isinstance(it, Cluster) else it.admin
    async with stream(admin.url, admin.token) as read:
        kind, data = await read.event()
        assert kind == "about"
        about = msgspec.json.decode(data, type=About)
        assert (about.source, about.title) == ("proxy", "m")
        assert (about.routing, about.migration) == ("jsq_load", "")
        yield read


async def test_the_files_of_the_page_need_no_token_and_allow_nothing_else(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer) as it:
        for path, kind in (("ui", "text/html"), ("ui/main.js", "text/javascript")):
            async with it.session.get(f"{it.listeners.admin.url}/{path}") as response:
                assert response.status == 200
                assert response.content_type == kind
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "script-src 'self';" in policy
                assert "unsafe" not in policy
                text = await response.text()
                assert it.listeners.admin.token not in text
        async with it.session.get(f"{it.listeners.admin.url}/ui/page.py") as response:
            assert response.status == 404
        async with it.session.get(f"{it.url}/ui") as response:
            assert response.status == 404, "clients have no page"


async def test_what_the_page_reads_needs_the_token(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        base = it.listeners.admin.url
        for path in ("page", "snapshots", "instances", "nowhere"):
            for url in (f"{base}/admin/{path}", f"{base}/admin/{path}?token={TOKEN}"):
                async with it.session.get(url) as response:
                    assert response.status == 401, url
        assert it.listeners.admin.page_url == f"{base}/ui#token={it.listeners.admin.token}"


async def test_the_page_is_sent_what_runs_and_what_has_moved(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, prefix_caching=False) as it:
        it.set_decodes(stalls_at=12)
        body = {"prompt": PROMPT, "max_tokens": 60, "request_id": "a-story"}
        running = asyncio.create_task(it.stream(body))
        await until(lambda: any(r.can_move and r.generated_tokens == 12 for r in it.requests()))
        async with watching(it) as read:
            seen = await read.snapshot()
            assert [one.name for one in seen.instances] == ["prefill-0", "decode-0", "decode-1"]
            columns = seen.requests
            assert (columns.name, columns.generated) == (["a-story"], [12])
            assert columns.prompt == [len(tokenizer.encode(PROMPT).ids)]
            assert columns.phase == [Phase.DECODING]
            at = seen.instances[columns.instance[0]]
            assert (at.role, at.kv_tokens) == ("decode", columns.prompt[0] + 12)
            assert columns.high == [-1], "no engine forecasts here"
            moving = asyncio.create_task(it.move())
            await until(lambda: any(r.freezing for e in it.decodes for r in e.running.values()))
            it.set_decodes(stalls_at=0)
            assert await moving == "moved"
            while not (moves := (await read.snapshot()).moves):
                pass
        assert (moves[0].outcome, moves[0].reason) == ("moved", "test")
        assert moves[0].source == at.name != moves[0].target
        assert moves[0].pause > 0
        await running


async def test_nothing_is_done_while_nobody_watches() -> None:
    source = MadeUpCluster(2, 3, 4096, seconds=0.001)
    feed = SnapshotFeed(source)
    assert source.looks == 0
    for _ in range(2):
        with feed.watching() as following:
            assert await following() is not None
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert feed.watchers == 0


async def test_all_watchers_share_what_is_made() -> None:
    feed = SnapshotFeed(MadeUpCluster(2, 3, 4096, seconds=0.001))
    with feed.watching() as one, feed.watching() as other:
        first, second = await asyncio.gather(one(), other())
        assert first is second
        assert first is not None
    feed.close()
    with feed.watching() as late:
        assert await late() is None


async def test_a_stream_ends_with_its_client(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        async with watching(it) as read:
            await read.snapshot()
            assert it.listeners.feed.watchers == 1
        await until(lambda: it.listeners.feed.watchers == 0)


async def test_a_stream_ends_with_the_proxy(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it, watching(it) as read:
        await read.snapshot()
        await it.listeners.close()
        async with asyncio.timeout(60):
            while (await read.event())[1]:
                pass  # what was on its way


async def test_a_demonstration_has_one_page_for_all_its_phases(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        (port,) = free_ports(1)
        options = msgspec.structs.replace(it.proxy.deployment.proxy, admin_port=port)
        deployment = msgspec.structs.replace(
            it.proxy.deployment, model="smollm2", served_model_name="m", proxy=options
        )
        for _ in range(2):
            async with (
                proxy_running(deployment, TOKEN),
                stream(deployment.admin_url, TOKEN) as read,
            ):
                assert (await read.event())[0] == "about"
                await read.snapshot()


LONG = {"prompt": PROMPT, "max_tokens": 400}


async def seen(read: Stream, condition: Callable[[Snapshot], bool]) -> Snapshot:
    """Return the first snapshot that meets a condition."""
    async with asyncio.timeout(60):
        while not condition(snapshot := await read.snapshot()):
            pass
    return snapshot


def decoding(snapshot: Snapshot) -> int:
    return snapshot.requests.phase.count(Phase.DECODING)


@pytest.mark.cluster(prefix_caching=False)
async def test_it_shows_the_requests_of_every_proxy_and_the_pauses_of_moves(
    many: Coordinated,
) -> None:
    with many.unhurried():
        tasks = [
            asyncio.create_task(proxy.stream({**LONG, "prompt": f"{PROMPT} {i}"}))
            for proxy in many.proxies
            for i in range(2)
        ]
        async with watching(many) as read:
            before = await seen(read, lambda one: decoding(one) == 4)
            status, _ = await many.ask("POST", "drain/decode-0")
            assert status == 200
            after = await seen(read, lambda one: len(one.moves) == 2)
    await asyncio.gather(*tasks)
    columns, held = before.requests, [0] * len(before.instances)
    names = dict(zip(columns.number, columns.name, strict=True))
    assert len(names) == 4, "each request has its number"
    for on, prompt, generated in zip(
        columns.instance, columns.prompt, columns.generated, strict=True
    ):
        assert prompt > 1
        held[on] += prompt + generated
    assert [one.kv_tokens for one in before.instances] == held
    decodes = [one.name for one in before.instances if one.role == "decode"]
    assert decodes == ["decode-0", "decode-1"]
    for move in after.moves:
        assert (move.source, move.target) == ("decode-0", "decode-1")
        assert (move.outcome, move.reason) == ("moved", "drain")
        assert move.pause > 0 and move.tokens > 0
        assert names[move.number] == move.name
    (drained,) = [one for one in after.instances if one.draining]
    assert (drained.name, drained.kv_tokens) == ("decode-0", 0)


@pytest.mark.slow
async def test_a_new_coordinator_shows_what_proxies_report(many: Coordinated) -> None:
    with many.unhurried():
        tasks = [asyncio.create_task(proxy.stream(LONG)) for proxy in many.proxies]
        async with watching(many) as read:
            await seen(read, lambda one: decoding(one) == 2)
            await many.stop_coordinator()
        await many.start_coordinator()
        async with watching(many) as read:
            await seen(read, lambda one: decoding(one) == 2)
    await asyncio.gather(*tasks)
