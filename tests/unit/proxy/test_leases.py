"""Prompts that are prefilled while decode instances are full: each is computed once."""

import asyncio

from scripted_cluster import cluster, until
from tokenizers import Tokenizer

from rescheduler.demo.demo_load import metric_in

LEASE_SECONDS = 12.0
TWICE = "headway_proxy_prompts_computed_twice_total"


async def test_no_prompt_is_computed_twice_however_long_requests_wait(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, decodes=1) as it:
        prefill, (decode,) = it.engines["prefill-0"], it.decodes
        prefill.lease_seconds = LEASE_SECONDS
        decode.says, decode.token_seconds = {"max_num_seqs": 2}, 0.1
        state = it.proxy.cluster.instances["decode-0"]
        await until(lambda: state.slots == 2)
        await asyncio.gather(*(it.answered(13) for _ in range(24)))  # 16 s for all
        assert decode.most_running == 2
        assert (decode.pulled, decode.recomputed) == (24, 0)
        assert metric_in(await it.text("/metrics"), TWICE, instance_name="prefill-0") == 0


async def test_what_nobody_can_read_any_more_is_not_pulled_and_counted(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, decodes=1) as it:
        prefill, (decode,) = it.engines["prefill-0"], it.decodes
        prefill.lease_seconds = 6.0
        decode.says = {"max_num_seqs": 1}
        state = it.proxy.cluster.instances["decode-0"]
        await until(lambda: state.slots == 1)
        decode.token_seconds = 0.5
        first = asyncio.create_task(it.answered(20))
        await until(lambda: len(decode.running) == 1)
        second = asyncio.create_task(it.answered(5))
        await until(lambda: len(prefill.lapses) == 1 and len(prefill.kept) == 1)
        await first
        decode.token_seconds = 0.002
        await second
        assert (decode.pulled, decode.recomputed) == (1, 0)
        assert metric_in(await it.text("/metrics"), TWICE, instance_name="prefill-0") == 1


async def test_no_prompt_waits_in_an_engine_for_memory_that_only_decoding_frees(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, decodes=1) as it:
        prefill, (decode,) = it.engines["prefill-0"], it.decodes
        decode.says = {"max_num_seqs": 1}
        states = it.proxy.cluster.instances
        await until(lambda: states["decode-0"].slots == 1)
        decode.stalls_at = 5
        streams = [asyncio.create_task(it.answered(10)) for _ in range(2)]
        await until(lambda: len(decode.running) == 1 and len(prefill.kept) == 1)
        prefill.full = True
        await until(lambda: states["prefill-0"].engine.free_blocks == 0)  # type: ignore[union-attr]
        streams += [asyncio.create_task(it.answered(10)) for _ in range(2)]
        await until(lambda: it.proxy.cluster.dispatcher.waiting_for_prefill == 2)
        await asyncio.sleep(0.3)
        assert it.proxy.cluster.dispatcher.waiting_for_prefill == 2
        decode.stalls_at = 0
        await asyncio.gather(*streams)  # what waits for nothing else is prefilled after all
