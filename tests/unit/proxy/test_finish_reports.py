"""When requests will finish, as clients are told, and promises of it."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from clients import client
from coordinated_cluster import Coordinated
from hypothesis import given
from hypothesis import strategies as st
from live_requests import live_request
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from scripted_cluster import PROMPT, Cluster, until

from rescheduler.engines.proxy_options import AccountOptions
from rescheduler.openai.openai_request import COMPLETIONS, RequestRefusedError
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.waiting_line import promised_first
from rescheduler.serving.connection import METRICS_SECONDS

ASKED = {"model": "m", "prompt": PROMPT, "max_tokens": 20, "stream": True}
SHOWN = {"stream_options": {"headway": True}}
ITEM = re.compile(r"(\d+\.\d{3});low=(\d+\.\d{3});high=(\d+\.\d{3})")


async def learned(it: Cluster) -> None:
    """Serve until enough is known to promise anything."""
    for _ in range(60):
        await it.answered(20)


async def lines_of(it: Cluster, **asked: Any) -> tuple[list[str], Any]:
    body = {**ASKED, **asked}
    async with it.session.post(it.url + COMPLETIONS, json=body) as response:
        return (await response.text()).split("\n\n"), response


async def test_streams_say_when_they_are_expected_to_finish(it: Cluster) -> None:
    _, first = await lines_of(it)
    assert "X-Headway-Expected-Finish" not in first.headers, "nothing is known yet"
    await learned(it)
    events, response = await lines_of(it)
    median, low, high = map(
        float, ITEM.fullmatch(response.headers["X-Headway-Expected-Finish"]).groups()
    )
    assert 0 < low <= median <= high
    assert not any(event.startswith(":") for event in events), "for those that ask only"
    assert await it.metric("headway_proxy_finish_forecasts_total", of="finish") > 20
    assert await it.metric("headway_proxy_expected_requests", arrivals="none") == 0, "all ended"
    assert await it.metric("headway_proxy_wanted_instances", seconds="60") >= 1


@pytest.mark.cluster(progress_seconds=0.1)
async def test_a_stream_that_asks_is_told_in_comments(it: Cluster) -> None:
    await learned(it)
    it.set_decodes(token_seconds=0.02)
    events, response = await lines_of(it, **SHOWN)
    assert "X-Headway-Expected-Start" in response.headers
    told = [json.loads(one[10:]) for one in events if one.startswith(": headway ")]
    assert len(told) > 1
    assert told[0]["state"] == "waiting" and told[0]["place"] == 0
    assert told[-1]["state"] == "running" and "start_s" not in told[-1]
    for one in told:
        low, median, high = one["finish_s"]
        assert 0 < low <= median <= high
        assert 1 <= one["tokens_left"][0] <= one["tokens_left"][2] <= 20
    assert not any("headway" in (body.get("stream_options") or {}) for body in it.asked)
    _, plain = await lines_of(it, stream_options={"headway": True, "include_usage": True})
    assert plain.status == 200
    options = [body["stream_options"] for body in it.asked if body.get("stream_options")]
    assert options == [{"include_usage": True}]


@pytest.mark.cluster(decodes=1, progress_seconds=0.1)
async def test_waiting_streams_are_told_their_place(it: Cluster) -> None:
    await learned(it)
    it.set_decodes(token_seconds=0.01)
    await it.resized(1)
    streams = [asyncio.create_task(lines_of(it, **SHOWN)) for _ in range(3)]
    answers = await asyncio.gather(*streams)
    places = [
        max(json.loads(one[10:]).get("place", 0) for one in events if one.startswith(": headway"))
        for events, _ in answers
    ]
    assert max(places) >= 1


@pytest.mark.cluster(decodes=1, order={"name": "fcfs", "fairness": 1.0})
async def test_what_is_promised_is_suspended_last_but_for_one_client_among_others(
    it: Cluster,
) -> None:
    async def wanted(session: Any, **asked: Any) -> Any:
        async with session.post(it.url + COMPLETIONS, json={**ASKED, **asked}) as response:
            await response.text()
        return it.asked[-1]["kv_transfer_params"]["headway"].get("suspended")

    await learned(it)
    assert await wanted(it.session) is None
    assert await wanted(it.session, finish_in_s=600) == "last"
    it.set_decodes(token_seconds=0.05)
    async with client(it, "127.0.0.2") as other:
        long = [asyncio.create_task(wanted(other, max_tokens=100, n=4)) for _ in range(3)]
        await until(lambda: len(it.requests()) == 3)
        short = asyncio.create_task(wanted(it.session, max_tokens=3))
        await until(lambda: len(it.requests()) == 4)
        assert await wanted(other, finish_in_s=600) is None, "it has more than its share"
        await asyncio.gather(short, *long)


async def test_what_is_likely_is_promised_and_the_rest_refused(it: Cluster) -> None:
    _, unknown = await lines_of(it, finish_in_s=0.001)
    assert unknown.status == 200, "only requests that run can tell how long they take"
    assert "X-Headway-Finish-Probability" not in unknown.headers
    await learned(it)
    _, response = await lines_of(it, finish_in_s=600)
    assert float(response.headers["X-Headway-Finish-Probability"]) >= 0.95
    status, body, headers = await it.post({**ASKED, "finish_in_s": 0.001, "stream": False})
    assert status == 429
    assert "the earliest that can be promised is" in body["error"]["message"]
    assert int(headers["Retry-After"]) >= 1
    _, anyway = await lines_of(it, finish_in_s=0.001, finish_level=0)
    assert float(anyway.headers["X-Headway-Finish-Probability"]) < 0.5
    _, at = await lines_of(it, finish_by=time.time() + 600)
    assert at.status == 200
    for outcome, n in (("given", 2), ("refused", 1), ("none", 2), ("kept", 2)):
        assert await it.metric("headway_proxy_promises_total", outcome=outcome) == n, outcome
    assert await it.metric("headway_proxy_promises_total", outcome="broken") == 0
    assert not any(name.startswith("finish_") for body in it.asked for name in body)


@pytest.mark.parametrize(
    "fields",
    [
        {"finish_in_s": 0},
        {"finish_in_s": -1},
        {"finish_in_s": "soon"},
        {"finish_in_s": [1]},
        {"finish_by": True},
        {"finish_in_s": 5, "finish_by": 5},
        {"finish_level": 0.9},
        {"finish_in_s": 5, "finish_level": 1},
        {"finish_in_s": 5, "finish_level": 0.99999},
        {"finish_by": 5},
        {"finish_in_s": 5, "finish_level": -0.1},
    ],
)
async def test_invalid_promises_are_refused_by_name(it: Cluster, fields: dict[str, Any]) -> None:
    status, body, _ = await it.post({**ASKED, **fields})
    assert status == 400
    assert "finish" in body["error"]["message"]
    assert body["error"]["param"].startswith("finish_")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"finish_by": 1795857882443}, "seconds since 1970"),
        ({"finish_by": 1e300}, "seconds since 1970"),
        ({"finish_by": 1_000_000_000}, "in the past"),
        ({"finish_by": 60}, "seconds since 1970"),
        ({"finish_in_s": 90_000}, "in seconds"),
        ({"finish_in_s": 1795857882443}, "in seconds"),
    ],
)
async def test_times_in_another_unit_are_refused_with_the_right_one(
    it: Cluster, fields: dict[str, Any], said: str
) -> None:
    status, body, _ = await it.post({**ASKED, **fields})
    assert status == 400
    assert said in body["error"]["message"]
    assert body["error"]["param"] == next(iter(fields))
    status, _, _ = await it.post({**ASKED, "stream": False, "finish_in_s": 86_400})
    assert status == 200


async def test_nothing_is_promised_to_several_answers(it: Cluster) -> None:
    status, body, _ = await it.post({**ASKED, "n": 2, "finish_in_s": 60, "stream": False})
    assert status == 400
    assert "`n`" in body["error"]["message"]


async def test_nothing_is_promised_where_a_coordinator_decides(many: Coordinated) -> None:
    one = many.proxies[0]
    status, _, _ = await one.post({"model": "m", "prompt": PROMPT, "max_tokens": 5})
    assert status == 200
    asked = {"model": "m", "prompt": PROMPT, "max_tokens": 5, "finish_in_s": 9}
    status, body, _ = await one.post(asked)
    assert status == 400
    assert "coordinator" in body["error"]["message"]


async def test_a_promise_is_left_where_its_client_leaves(it: Cluster) -> None:
    await learned(it)
    it.set_decodes(token_seconds=0.2)
    body = {**ASKED, "finish_in_s": 600}
    async with it.session.post(it.url + COMPLETIONS, json=body) as response:
        await response.content.readline()
    await it.idle()
    it.set_decodes(token_seconds=0.002)
    assert await it.metric("headway_proxy_promises_total", outcome="left") == 1


def test_promised_requests_start_when_they_must() -> None:
    requests = [live_request(str(i)) for i in range(4)]
    accounts = Accounts(AccountOptions())
    for i, (start, finish) in {1: (50.0, 90.0), 3: (40.0, 80.0)}.items():
        requests[i].start_by, requests[i].finish_by = start, finish
        requests[i].promised_level = 0.9

    def order(now: float, longest: float = 1e6) -> list[str]:
        return [one.id for one in promised_first(requests, accounts, now, longest)]

    assert order(30.0) == ["0", "1", "2", "3"]
    assert order(45.0) == ["3", "0", "1", "2"]
    assert order(60.0) == ["3", "1", "0", "2"]
    assert order(85.0) == ["1", "0", "2", "3"], "what is late already leads nobody"
    assert order(60.0, longest=10.0) == ["0", "3", "2", "1"], "promises keep nobody out"
    requests[3].promised_level = 0.001
    assert order(60.0) == ["1", "0", "2", "3"], "it was as good as broken when it was given"
    requests[1].account.settle(requests[1], 5000.0)
    assert order(60.0) == ["0", "1", "2", "3"], "its account is ahead of all others"


def test_an_account_that_breaks_its_promises_is_led_by_them_no_more() -> None:
    requests = [live_request(str(i)) for i in range(2)]
    requests[1].start_by = 0.0
    requests[1].finish_by = 90.0
    requests[1].promised_level = 0.9
    accounts = Accounts(AccountOptions())
    assert promised_first(requests, accounts, 10.0, 1e6) == requests[::-1]
    requests[1].account.strictness[0.9] = 1.5
    assert promised_first(requests, accounts, 10.0, 1e6) == requests


@pytest.mark.cluster(decodes=1, pool=100)
async def test_a_burst_is_not_promised_as_if_each_were_alone(it: Cluster) -> None:
    it.set_decodes(token_seconds=0.005)
    await it.resized(1)
    await learned(it)
    asked = [lines_of(it, finish_in_s=1.0) for _ in range(40)]
    statuses = [response.status for _, response in await asyncio.gather(*asked)]
    assert 1 <= statuses.count(200) < 30
    assert await it.metric("headway_proxy_promises_total", outcome="kept") >= 1
    broken = await it.metric("headway_proxy_promises_total", outcome="broken")
    assert broken <= statuses.count(200) / 2


async def test_engines_that_say_0_leave_the_metrics_as_they_are(it: Cluster) -> None:
    await learned(it)
    it.set_decodes(says={"max_num_seqs": 0})
    await asyncio.sleep(0.3)
    assert await it.metric("headway_proxy_num_requests_waiting") == 0
    assert "headway_proxy_expected_requests" in await it.text("/metrics")


@pytest.mark.parametrize("options", [{"note": "headway"}, {"headways": True}, {"headway": "a"}])
async def test_other_stream_options_are_the_engines(it: Cluster, options: dict[str, Any]) -> None:
    _, response = await lines_of(it, stream_options=options)
    assert response.status == 200


async def test_slow_readers_are_not_the_fleets_fault(it: Cluster) -> None:
    await learned(it)
    before = await expected_finish(it)
    for _ in range(15):
        body = {**ASKED, "finish_in_s": 2.0}
        async with it.session.post(it.url + COMPLETIONS, json=body) as response:
            await asyncio.sleep(0.1)
            await response.read()
    assert await expected_finish(it) < 3 * before
    assert await it.metric("headway_proxy_promises_total", outcome="broken") == 0


async def test_nothing_is_told_to_whom_no_engine_has_accepted(it: Cluster) -> None:
    """When requests finish also says how busy the engines are."""
    it.set_engines(key="right")
    it.session.headers["Authorization"] = "Bearer right"
    await learned(it)
    _, known = await lines_of(it, finish_in_s=600, **SHOWN)
    assert {"X-Headway-Finish-Probability", "X-Headway-Expected-Finish"} <= {*known.headers}
    for key in ("Bearer wrong", ""):
        it.session.headers["Authorization"] = key
        for asked in (SHOWN, {"finish_in_s": 600}, {"finish_in_s": 600, "finish_level": 0}):
            events, response = await lines_of(it, **asked)
            assert response.status == 401
            assert not any("headway" in event for event in events)
            assert not any(name.startswith("X-Headway") for name in response.headers)
        status, body, headers = await it.post({**ASKED, "finish_in_s": 0.001})
        assert status == 429 and headers["Retry-After"] == "1"
        assert "earliest" not in body["error"]["message"]


@pytest.mark.cluster(keep_alive_seconds=0.1)
async def test_signs_of_life_tell_nothing_to_whom_no_engine_has_accepted(it: Cluster) -> None:
    await learned(it)
    it.set_engines(hangs=True)
    headers = {"Authorization": "Bearer unknown"}
    body = {**ASKED, **SHOWN}
    async with it.session.post(it.url + COMPLETIONS, json=body, headers=headers) as response:
        assert await response.content.readline() == b": keep-alive\n"
        assert not any(name.startswith("X-Headway") for name in response.headers)
        it.set_engines(hangs=False)
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_what_no_engine_has_accepted_scales_nothing(it: Cluster) -> None:
    """However large it is: not what engines refuse, and not what has a wrong key."""
    await learned(it)
    load = it.proxy.reports.finish_times.load  # type: ignore[union-attr]
    before = await it.metric("headway_proxy_wanted_instances", seconds="300")
    prompt = load._arrivals.prompt_tokens
    counted = len(it.tokenizer.encode(PROMPT).ids)
    assert prompt == pytest.approx(counted), "as engines count it"
    it.set_engines(fails=400)
    large = {**ASKED, "prompt": "a" * 900_000}
    asked = [large, {**large, "stream": False}]
    for body in 5 * asked:
        status, _, _ = await it.post(body)
        assert status == 400
    it.set_engines(fails=0)
    assert load._arrivals.prompt_tokens == pytest.approx(prompt)
    await asyncio.sleep(0.2)  # until the load ahead is seen anew
    assert await it.metric("headway_proxy_wanted_instances", seconds="300") <= before


async def test_the_metrics_are_rendered_once_a_second_whoever_asks(it: Cluster) -> None:
    rendered = 0

    class Counted(Collector):
        def collect(self) -> Iterator[Metric]:
            nonlocal rendered
            rendered += 1
            return iter(())

    it.proxy.metrics.add(Counted())
    began, first = time.monotonic(), rendered

    async def scrape() -> str:
        async with it.session.get(it.url + "/metrics") as response:
            return await response.text()

    texts = [*await asyncio.gather(*(scrape() for _ in range(20)))]
    while time.monotonic() < began + METRICS_SECONDS:
        texts.append(await scrape())
    assert rendered - first <= 1 + (time.monotonic() - began) / METRICS_SECONDS
    assert all("headway_proxy_requests" in text for text in texts)


async def expected_finish(it: Cluster) -> float:
    _, response = await lines_of(it)
    return float(response.headers["X-Headway-Expected-Finish"].split(";")[0])


async def test_what_generates_nothing_counts_for_nothing(it: Cluster) -> None:
    await learned(it)
    wanted = await it.metric("headway_proxy_wanted_instances", seconds="300")
    for _ in range(100):
        await it.post({"model": "m", "prompt": PROMPT}, "/tokenize")
    assert await it.metric("headway_proxy_wanted_instances", seconds="300") <= wanted
    status, body, _ = await it.post({"model": "m", "input": "a", "finish_in_s": 3}, "/v1/responses")
    assert status == 400 and body["error"]["param"] == "finish_in_s"


async def test_draining_instances_have_no_room(it: Cluster) -> None:
    await learned(it)
    assert it.proxy.reports is not None
    times = it.proxy.reports.finish_times.load
    assert times.ahead is not None and times.ahead.takes.all()
    await it.admin("POST", "drain/" + it.decodes[0].name)
    await asyncio.sleep(0.2)
    assert times.ahead.takes.tolist() == [False, True]


@given(
    st.dictionaries(
        st.sampled_from(
            ["finish_in_s", "finish_by", "finish_level", "stream_options", "service_tier"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.sampled_from(["headway", "a"]), inner, max_size=2)
            ),
            max_leaves=4,
        ),
    )
)
def test_whatever_is_asked_is_read_or_refused(fields: dict[str, Any]) -> None:
    raw = json.dumps({"prompt": "a", "stream": True, **fields}).encode()
    try:
        client = read_request(COMPLETIONS, raw)
    except RequestRefusedError as error:
        assert error.status == 400
        return
    assert client.finish_in is None or client.finish_in > 0
    assert not any(name.startswith("finish_") for name in client.body)
