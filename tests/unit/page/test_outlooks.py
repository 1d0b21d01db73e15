"""What the page says of finish times, promises and the load ahead, and what came of them."""

import asyncio

import pytest
from scripted_cluster import PROMPT, cluster, until
from tokenizers import Tokenizer

from rescheduler.page.expectations import SECONDS, Outlooks
from rescheduler.page.live_snapshots import LiveSnapshots

BODY = {"prompt": PROMPT, "max_tokens": 20}


async def test_nothing_is_said_before_anything_is_known(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        snapshot = it.listeners.feed._source.look().snapshot()
        assert snapshot.finishes is snapshot.outlook is None


async def test_how_forecasts_and_promises_came_out_is_counted(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        for _ in range(55):
            await it.stream(BODY)
        await it.stream({**BODY, "finish_in_s": 600})
        status, _, _ = await it.post({"model": "m", **BODY, "finish_in_s": 0.001})
        assert status == 429
        seen = it.listeners.feed._source.look().snapshot().finishes
        assert seen is not None
        assert (seen.kept, seen.broken, seen.refused) == (1, 0, 1)
        assert seen.forecasts > 25
        exported = {"within": 0.0, "any": 0.0}
        for line in (await it.text("/metrics")).splitlines():
            if line.startswith('headway_proxy_finish_forecasts_total{of="finish"'):
                exported["any"] += float(line.split()[-1])
                if 'outcome="within"' in line:
                    exported["within"] += float(line.split()[-1])
        assert seen.forecasts == exported["any"]
        assert seen.held == pytest.approx(exported["within"] / exported["any"], abs=1e-4)


async def test_what_was_expected_of_now_is_said_beside_what_is(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        assert it.proxy.reports is not None
        now = [1000.0]
        outlooks = Outlooks(it.proxy.reports, it.proxy.cluster.decodes, clock=lambda: now[0])
        assert outlooks.now() is None
        await it.stream(BODY)
        first = outlooks.now()
        assert first is not None
        assert first.foretold == []
        low, median, high = first.tokens
        assert 0 <= low <= median <= high
        assert first.wanted is not None and first.wanted >= 1
        for _ in range(20):
            await it.stream(BODY)  # the same minute's arrivals are more by now
        now[0] += SECONDS / 2
        second = outlooks.now()
        assert second is not None
        assert second.tokens[1] > median
        assert second.foretold == []
        now[0] += SECONDS / 2
        third = outlooks.now()
        assert third is not None and third.foretold == first.tokens
        now[0] += SECONDS / 2 + 0.4
        fourth = outlooks.now()
        assert fourth is not None and fourth.foretold == second.tokens
        now[0] += 10 * SECONDS
        late = outlooks.now()
        assert late is not None and late.foretold == [], "nobody looked a minute before"


async def test_a_snapshot_has_the_load_ahead_of_a_proxy_that_forecasts(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer) as it:
        await it.stream(BODY)
        it.set_decodes(stalls_at=12)
        running = asyncio.create_task(it.stream(BODY))
        await until(lambda: any(r.generated_tokens == 12 for r in it.requests()))
        seen = LiveSnapshots(it.proxy.cluster, reports=it.proxy.reports).look().snapshot()
        without = LiveSnapshots(it.proxy.cluster).look().snapshot()
        it.set_decodes(stalls_at=0)
        await running
        assert seen.outlook is not None
        assert (seen.outlook.seconds, len(seen.outlook.tokens)) == (SECONDS, 3)
        assert without.outlook is without.finishes is None, "as where a coordinator decides"
