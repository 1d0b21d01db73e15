"""Engines without Headway in them, which others use, too: what the proxy knows and says of them."""

import asyncio
import logging
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_cluster import Cluster, cluster, until
from scripted_engine import StockEngine
from tokenizers import Tokenizer

from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.placement.engine_loads import read_load

stock = pytest.mark.cluster(kind=StockEngine)
BUSY = {"strangers": 5, "used": 0.5}  # 8,000 tokens


def others(it: Cluster) -> dict[str, int]:
    return {one.name: len(one.others) for one in it.proxy.cluster.all}


async def placed_on(it: Cluster, requests: int) -> list[str]:
    """Send requests one after the other; return where each was decoded."""
    before = {engine.name: len(engine.bodies) for engine in it.decodes}
    went = []
    for _ in range(requests):
        await it.answered(3)
        now = {engine.name: len(engine.bodies) for engine in it.decodes}
        went.append(next(name for name in now if now[name] > before[name]))
        before = now
    return went


PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="100",\
num_gpu_blocks_override="7",skip="{}"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="200"} 1.0
"""


def test_a_page_of_vllm_says_requests_and_tokens_of_all_ranks() -> None:
    assert read_load(PAGE.encode()) == (6, 25 * 32 + 100 * 32)
    unknown = PAGE.replace('num_gpu_blocks="200"', 'num_gpu_blocks="None"')
    assert read_load(unknown.encode()) == (6, None)


LINE = 'vllm:num_requests_running{engine="0"} '


@example((LINE + "1e999\n").encode())
@example((LINE + "-1\n").encode())
@example((LINE + "e\n").encode())
@example(b"vllm:num_requests_running{" * 40_000)
@example(PAGE.replace('"100"', '"' + "9" * 5000 + '"').encode())
@given(
    st.binary(max_size=300)
    | st.from_regex(re.compile(LINE + r"[0-9eE.+-]{1,12}\n")).map(str.encode)
)
def test_whatever_a_page_says_is_bounded_or_refused(page: bytes) -> None:
    try:
        requests, tokens = read_load(page)
    except ValueError:
        return
    assert 0 <= requests <= 2**30
    assert tokens is None or 0 <= tokens <= 2**40


def test_a_page_that_repeats_itself_is_not_read_to_its_end() -> None:
    with pytest.raises(ValueError, match="more than 1024 samples"):
        read_load(f"{LINE}1\n".encode() * 10_000)


@stock
async def test_requests_of_other_clients_count_in_routing(it: Cluster) -> None:
    await placed_on(it, 1)  # compiled
    for busy, idle in (it.decodes, it.decodes[::-1]):
        vars(busy).update(BUSY)
        vars(idle).update(strangers=0, used=0.0)
        await until(lambda: others(it)[busy.name] == 5 and others(it)[idle.name] == 0)  # noqa: B023
        assert set(await placed_on(it, 4)) == {idle.name}
        assert await it.metric("headway_proxy_other_requests", instance_name=busy.name) == 5
        tokens = await it.metric("headway_proxy_other_context_tokens", instance_name=busy.name)
        assert tokens == 8000


@stock
async def test_what_the_proxy_runs_itself_is_nobody_elses(it: Cluster) -> None:
    asking = [asyncio.create_task(it.answered(200)) for _ in range(6)]
    most = 0
    while not all(task.done() for task in asking):
        most = max(most, *others(it).values())
        await asyncio.sleep(0.005)
    assert most == 0
    it.set_decodes(**BUSY)
    await until(lambda: [others(it)[one.name] for one in it.decodes] == [5, 5])


@pytest.mark.cluster(kind=StockEngine, control_seconds=0.3)
@pytest.mark.parametrize("fault", ["absent", "lies", "no numbers", "slow", "large"])
async def test_an_engine_whose_metrics_are_wrong_serves_like_any_other(
    it: Cluster, fault: str
) -> None:
    it.set_decodes(**BUSY)
    await until(lambda: all(others(it)[one.name] == 5 for one in it.decodes))

    pages = {"lies": LINE + "1e300\n", "no numbers": "ok", "large": "x" * (2 << 20)}
    if fault == "absent":
        it.set_decodes(metrics=False)
    elif fault == "slow":
        it.set_decodes(metrics_seconds=30.0)
    else:
        it.set_decodes(page=pages[fault])
    most = 1024 if fault == "lies" else 0
    await until(lambda: all(others(it)[one.name] == most for one in it.decodes))
    assert len(await placed_on(it, 4)) == 4
    assert it.in_service


@stock
async def test_operators_are_told_what_such_engines_lack(it: Cluster) -> None:
    it.set_decodes(**BUSY)
    await until(lambda: all(others(it)[one.name] == 5 for one in it.decodes))
    _, listed = await it.admin("GET", "instances")
    assert [one["without"] for one in listed["instances"]] == [["control", "telemetry"]] * 3
    assert [one["other_requests"] for one in listed["instances"]] == [0, 5, 5]
    shown = LiveSnapshots(it.proxy.cluster).look().snapshot().instances
    assert [one.without for one in shown] == [[], *[["control", "telemetry"]] * 2]
    assert [one.other_requests for one in shown] == [0, 5, 5]


async def test_the_log_says_at_the_start_what_is_missing_and_what_adds_it(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway.serve")
    async with cluster(tokenizer):
        told = [record.getMessage() for record in caplog.records if "adds it" in record.msg]
    async with cluster(tokenizer, kind=StockEngine):
        all_told = [record.getMessage() for record in caplog.records if "adds it" in record.msg]
    (of_telemetry,) = told
    assert of_telemetry.startswith("decode-0, decode-1: no `telemetry`: no forecasts of lengths; ")
    assert "LiveHeadwayWorker" in of_telemetry
    of_control = all_told[1]
    assert of_control.startswith("decode-0, decode-1: no `control`: requests never move away alive")
    assert "--kv-transfer-config" in of_control
