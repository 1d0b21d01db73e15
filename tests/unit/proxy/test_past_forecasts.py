"""What a proxy learns from requests that end, and whom it tells nothing of it."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer

from predictor.past import length_memory
from predictor.past.length_memory import LengthMemory
from rescheduler.engines.deployment import DeploymentError
from rescheduler.engines.proxy_options import PastOptions
from rescheduler.openai.openai_request import CHAT, COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.account import OTHERS
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import LengthFactors, Placeable, Placements
from rescheduler.proxy import past_forecasts
from rescheduler.proxy.past_forecasts import PastForecasts, prefix_keys

SALT = bytes(32)
CHECKPOINT = "checkpoints/smollm2-135m-instruct-prompt"


def keys(path: str = CHAT, salt: bytes = SALT, **fields: Any) -> list[int]:
    body = read_request(path, json.dumps(fields).encode()).body
    return [*map(int, prefix_keys(body, salt, path == CHAT))]


def say(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return first + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# Keys


def test_a_turn_has_the_keys_of_the_turns_before_it() -> None:
    first = keys(messages=say("Why?", system="Be brief."))
    later = keys(messages=say("Why?", "Because.", "And why?", system="Be brief."))
    assert later[: len(first)] == first
    assert len(later) == len(first) + 2


def test_the_template_comes_first() -> None:
    one, other = (keys(messages=say(text, system="Be brief.")) for text in ("Why?", "How?"))
    assert one[0] == other[0]
    assert one[1:] != other[1:]
    assert keys(messages=say("Why?", system="Be long."))[0] != one[0]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert keys(messages=say("Why?", system="Be brief."), tools=tools)[0] != one[0]


def test_long_prompts_share_the_pieces_with_which_they_begin() -> None:
    text = "a" * 10_000
    one, other = keys(COMPLETIONS, prompt=text + "b"), keys(COMPLETIONS, prompt=text + "c")
    assert len(one) == 6
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 5 + [False]


def test_nobody_reads_a_prompt_from_its_keys_without_the_salt() -> None:
    assert not set(keys(prompt=PROMPT, path=COMPLETIONS)) & set(
        keys(prompt=PROMPT, path=COMPLETIONS, salt=b"1" * 32)
    )


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_no_prompt_is_too_strange_for_keys(value: Any) -> None:
    for field in ("prompt", "messages", "tools"):
        body = {field: json.dumps(value).encode()}
        assert len(prefix_keys(body, SALT, True)) >= 1  # type: ignore[arg-type]


@pytest.mark.parametrize("item", [b"{}", b"1", b"[]", b'""', b"null"])
def test_a_prompt_of_many_small_messages_is_not_read_message_by_message(item: bytes) -> None:
    body = {"messages": b"[" + b",".join([item] * 200_000) + b"]"}
    assert len(prefix_keys(body, SALT, True)) < 600  # type: ignore[arg-type]
    assert len(prefix_keys(body, SALT, False)) < 3  # type: ignore[arg-type]


def test_of_tools_as_large_as_bodies_may_be_a_part_is_read() -> None:
    one, other = ({"tools": b"[" + b"1," * (4 << 20) + end} for end in (b"2]", b"3]"))
    longer = {"tools": other["tools"] + b" "}
    first, same, third = (prefix_keys(body, SALT, True)[0] for body in (one, other, longer))  # type: ignore[arg-type]
    assert first == same != third


@pytest.mark.parametrize(
    "file", ["", "x\0y", "~nobodysuch/past", "{folder}", "{folder}/new/", "{file}/past", "{fifo}"]
)
def test_where_nothing_can_be_kept_is_said_at_the_start(file: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    names = {"folder": tmp_path, "file": tmp_path / "file", "fifo": tmp_path / "fifo"}
    with pytest.raises(DeploymentError, match=r"proxy\.past\.file: "):
        PastForecasts(PastOptions(keys=64, file=file.format(**names)))


def test_the_folder_of_the_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "headway" / "past"
    PastForecasts(PastOptions(keys=64, file=str(path))).close()
    assert path.is_file()


async def test_what_is_kept_every_five_minutes_is_whole_and_copied_in_many_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length_memory, "_SETS_AT_ONCE", 4)
    past = PastForecasts(PastOptions(keys=4096, file=str(tmp_path / "past")))
    for i in range(300):
        recalled = past.memory.recall(1, i % 7, np.array([i], dtype=np.uint64))
        past.memory.learn(recalled, 100 + i)
    turns = sum(1 for _ in past.memory.copied())
    assert turns > 50
    (await past._copied()).save(tmp_path / "copy")
    past.memory.save(tmp_path / "itself")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "itself").read_bytes()
    assert LengthMemory.load(tmp_path / "copy", 4096).known == past.memory.known > 300


# Requests


def begun(forecasts: PastForecasts, client: str, **fields: Any) -> LiveRequest:
    """Return a request that has arrived, and is forecast."""
    raw = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 2000, **fields}).encode()
    placements = Placements[LiveRequest]()
    asked = read_request(COMPLETIONS, raw)
    request = LiveRequest("id", "name", asked, {}, 0.0, None, placements)
    request.account.name = client
    request.expected_tokens = forecasts.expected(request)
    return request


def live(forecasts: PastForecasts, tokens: int, client: str, **fields: Any) -> int | None:
    """Serve a request with so many tokens; return what was expected of it."""
    request = begun(forecasts, client, **fields)
    expected = request.expected_tokens
    end(forecasts, request, tokens)
    return expected


def end(forecasts: PastForecasts, request: LiveRequest, tokens: int) -> None:
    request.reported(5, tokens)
    forecasts.ended(request, tokens > 0)


def test_a_client_is_expected_to_go_on_as_before() -> None:
    forecasts = PastForecasts(PastOptions())
    assert live(forecasts, 900, "long") is None
    assert live(forecasts, 5, "short") is None
    for _ in range(20):
        live(forecasts, 900, "long")
        live(forecasts, 5, "short")
    long, short = (live(forecasts, 5, client) for client in ("long", "short"))
    assert long is not None
    assert short is not None
    assert short < 20 < 500 < long
    assert live(forecasts, 5, "long", max_tokens=50) in range(40, 51)
    assert live(forecasts, 5, "another") is None


def test_what_did_not_end_by_itself_teaches_nothing() -> None:
    forecasts = PastForecasts(PastOptions())
    live(forecasts, 0, "a")
    live(forecasts, 900, "a", n=3)  # nobody has counted its tokens
    assert forecasts.memory.known == 0
    assert live(forecasts, 3, "a") is None


def test_several_answers_teach_their_mean() -> None:
    forecasts = PastForecasts(PastOptions())
    for _ in range(20):
        request = begun(forecasts, "a", n=3)
        request.was_counted(5, 3 * 40)
        forecasts.ended(request, by_itself=True)
    assert live(forecasts, 40, "a") in range(35, 46)
    for _ in range(20):
        request = begun(forecasts, "b", n=3, max_tokens=40)
        request.was_counted(5, 3 * 40)
        forecasts.ended(request, by_itself=True)
    assert (live(forecasts, 40, "b") or 0) > 60, "all were cut"


def test_requests_with_one_prompt_are_forecast_anew_as_each_ends() -> None:
    forecasts = PastForecasts(PastOptions())
    first, *others = (begun(forecasts, "a") for _ in range(6))
    other_prompt, other_client = begun(forecasts, "a", prompt="?"), begun(forecasts, "b")
    capped = begun(forecasts, "a", max_tokens=50)
    assert {one.expected_tokens for one in (first, *others, other_prompt, capped)} == {None}
    end(forecasts, first, 1500)
    told = {one.expected_tokens for one in others}
    assert len(told) == 1
    assert 500 < (told.pop() or 0) <= 1500
    assert (capped.expected_tokens or 0) in range(40, 51)
    assert other_prompt.expected_tokens is other_client.expected_tokens is None
    third, *others = others
    before = others[0].expected_tokens or 0
    end(forecasts, third, 4)
    assert all((one.expected_tokens or 0) < before for one in others)


def test_a_prompts_forecast_counts_less_the_more_is_known_of_its_client() -> None:
    forecasts = PastForecasts(PastOptions())
    new = begun(forecasts, "a")
    assert forecasts.with_prompt(new, 100) == 100
    forecasts.ended(new, by_itself=False)
    before = 100
    for n in (1, 10, 40):
        for _ in range(n):
            live(forecasts, 900, "a")
        request = begun(forecasts, "a")
        by_past = request.expected_tokens or 0
        together = forecasts.with_prompt(request, 100)
        assert before < together <= round((100 * by_past) ** 0.5) + 1
        before = together
        forecasts.ended(request, by_itself=False)
    assert before > 270, "nearly the geometric mean"


def test_siblings_that_wait_keep_what_their_prompt_says_as_the_past_is_told_anew() -> None:
    forecasts = PastForecasts(PastOptions())
    waits = begun(forecasts, "a")
    waits.expected_tokens = forecasts.with_prompt(waits, 200)
    for _ in range(8):
        live(forecasts, 8, "a")
    assert waits.expected_tokens in range(30, 110), "between both"


def test_what_a_predictor_said_of_a_sibling_stays() -> None:
    forecasts = PastForecasts(PastOptions())
    first, other = (begun(forecasts, "a") for _ in range(2))
    other.expected_tokens = 77
    end(forecasts, first, 1500)
    assert other.expected_tokens == 77


def test_siblings_that_were_cut_tell_the_others_nothing_and_leave_nothing() -> None:
    forecasts = PastForecasts(PastOptions())
    several = [begun(forecasts, "a") for _ in range(3)]
    for request in several:
        end(forecasts, request, 0)
    assert {one.expected_tokens for one in several} == {None}
    assert not forecasts._siblings
    assert not forecasts._running


def test_of_many_siblings_so_many_are_forecast_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_forecasts, "_MOST_SIBLINGS", 3)
    forecasts = PastForecasts(PastOptions())
    first, *others = (begun(forecasts, "a") for _ in range(8))
    end(forecasts, first, 9)
    assert sum(one.expected_tokens is not None for one in others) == 3


def test_all_that_wait_are_told_in_turn_though_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_forecasts, "_MOST_SIBLINGS", 4)
    forecasts = PastForecasts(PastOptions())
    running = [begun(forecasts, "a") for _ in range(20)]
    waiting = [begun(forecasts, "a") for _ in range(20)]
    for request in running:
        request.reported(5, 1)
    for request in running[:10]:
        end(forecasts, request, 9)
    assert all(one.expected_tokens is not None for one in waiting)


def test_answers_that_end_first_say_nothing_of_those_that_outlive_them() -> None:
    forecasts = PastForecasts(PastOptions())
    for _ in range(20):
        live(forecasts, 600, "a", prompt="?")
    running, waits = begun(forecasts, "a"), begun(forecasts, "a")
    first = running.expected_tokens or 0
    assert first > 400
    running.reported(5, 500)
    for _ in range(4):
        live(forecasts, 60, "a")
    assert running.expected_tokens == first
    assert waits.expected_tokens is not None
    one_that_runs = waits.expected_tokens
    forecasts.ended(running, by_itself=False)
    live(forecasts, 60, "a")
    assert waits.expected_tokens < one_that_runs * 0.8, "it has outlived the others"


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"stop": ["."]},
    ],
)
def test_what_sets_the_length_of_answers_is_part_of_the_template(field: dict[str, Any]) -> None:
    forecasts = PastForecasts(PastOptions())
    for _ in range(20):
        live(forecasts, 1500, "a", **field)
        live(forecasts, 10, "a")
    assert (live(forecasts, 10, "a") or 0) < 100 < 800 < (live(forecasts, 10, "a", **field) or 0)


def test_of_more_clients_than_are_kept_the_prefixes_are_known() -> None:
    forecasts = PastForecasts(PastOptions())
    for _ in range(30):
        live(forecasts, 900, "a")
    for i in range(length_memory.MOST_CLIENTS):
        live(forecasts, 5, f"other {i}", prompt="?")
    assert (live(forecasts, 5, "a") or 0) > 500
    assert live(forecasts, 5, "new") is None


def test_clients_that_share_an_account_are_told_nothing_of_each_other() -> None:
    forecasts = PastForecasts(PastOptions())
    live(forecasts, 900, OTHERS)
    assert live(forecasts, 900, OTHERS) is None
    assert forecasts.memory.known == 0


@pytest.mark.parametrize("content", [b"no memory", b"model: mine\n"])
def test_a_file_of_something_different_is_kept(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "past"
    file.write_bytes(content)
    PastForecasts(PastOptions(file=str(file))).close()
    assert (tmp_path / "past.refused").read_bytes() == content
    assert "it is past.refused now" in caplog.text
    assert LengthMemory.load(file).known == 0


def test_a_file_that_cannot_be_read_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "past"
    PastForecasts(PastOptions(keys=64, file=str(file))).close()
    before = file.read_bytes()
    monkeypatch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(OSError(5, "disk")))
    forecasts = PastForecasts(PastOptions(keys=64, file=str(file)))
    monkeypatch.undo()
    live(forecasts, 900, "a")
    forecasts.close()
    assert file.read_bytes() == before
    assert "keeps nothing" in caplog.text


def test_fewer_keys_keep_as_much_of_a_file_as_fits(tmp_path: Path) -> None:
    file = str(tmp_path / "past")
    forecasts = PastForecasts(PastOptions(keys=1 << 12, file=file))
    for i in range(1_000):
        live(forecasts, 900, "a", prompt=str(i))
    forecasts.close()
    fewer = PastForecasts(PastOptions(keys=64, file=file))
    assert 40 < fewer.memory.known <= 64
    assert (live(fewer, 5, "a") or 0) > 500


def test_a_broken_file_does_not_keep_a_proxy_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "past"
    file.write_bytes(b"no memory")
    forecasts = PastForecasts(PastOptions(file=str(file)))
    assert "begins anew" in caplog.text
    live(forecasts, 900, "a")
    forecasts.close()
    assert live(PastForecasts(PastOptions(file=str(file))), 5, "a") is not None


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forecasts = PastForecasts(PastOptions(file=str(tmp_path / "folder" / "past")))
    (tmp_path / "folder").rmdir()
    assert forecasts._file is not None
    forecasts._file.save(forecasts.memory)
    forecasts.close()
    assert caplog.text.count("only the first failure") == 1


# A proxy

ASKED = {"model": "m", "prompt": PROMPT, "max_tokens": 6}


async def sources(it: Cluster) -> dict[str, float]:
    names = ("prompt", "past", "both", "none")
    metric = it.proxy.metrics.length_forecasts
    return {name: metric.labels(name)._value.get() for name in names}


@pytest.mark.cluster(order={"name": "boost"})
async def test_a_proxy_learns_as_requests_end(it: Cluster) -> None:
    for _ in range(3):
        assert (await it.post(ASKED))[0] == 200
    assert await sources(it) == {"prompt": 0, "past": 2, "both": 0, "none": 1}
    assert it.proxy._past is not None
    assert not it.proxy._past._running
    assert it.proxy._past.memory.known > 0


@pytest.mark.cluster(order={"name": "boost"}, prompt_checkpoint=CHECKPOINT)
async def test_a_forecast_from_the_prompt_and_the_past_are_taken_together(it: Cluster) -> None:
    for _ in range(3):
        assert (await it.post(ASKED))[0] == 200
    assert await sources(it) == {"prompt": 1, "past": 0, "both": 2, "none": 0}
    errors = "headway_proxy_length_forecast_error_factor"
    assert await it.metric(f"{errors}_count", source="both") == 0, "all were cut"
    for engine in it.engines.values():
        engine.longest = 20
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    assert len(await it.stream(chat, path="/v1/chat/completions")) > 1
    await until(lambda: not it.proxy.running)
    for source in ("prompt", "past", "both"):
        (factor,) = it.proxy.cluster.length_factors.latest[source]
        assert factor >= 1
        assert await it.metric(f"{errors}_sum", source=source) == pytest.approx(factor)


def test_factors_say_how_many_times_as_long_or_as_short_an_answer_was() -> None:
    factors = LengthFactors()
    answered = Placeable("", length_forecasts={"prompt": 100, "past": 800, "both": 0})
    answered.reported(1, 200)
    assert factors.ended(answered) == {"prompt": 2.0, "past": 4.0, "both": 200.0}
    for other in ({"max_tokens": 200}, {"several": True}):
        cut = Placeable("", length_forecasts={"past": 1}, **other)  # type: ignore[arg-type]
        cut._generated = 200
        assert factors.ended(cut) == {}
    assert [len(latest) for latest in factors.latest.values()] == [1, 1, 1]


@pytest.mark.cluster(order={"name": "boost"}, prompt_checkpoint=CHECKPOINT)
async def test_what_ends_while_a_prompt_is_forecast_counts(
    it: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    past, predictor = it.proxy._past, it.proxy._forecasts
    assert past is not None
    assert predictor is not None
    first = begun(past, "127.0.0.1")

    async def too_slow(client: Any, account: str) -> None:
        end(past, first, 1500)

    monkeypatch.setattr(predictor, "expected", too_slow)
    asked = read_request(COMPLETIONS, json.dumps({**ASKED, "max_tokens": 2000}).encode())
    waits = it.proxy.new_request(asked, None, {})
    waits.account = it.proxy.cluster.accounts.named("127.0.0.1")
    first.account.name = "127.0.0.1"
    await it.proxy.forecast(waits)
    assert (waits.expected_tokens or 0) > 500
    assert (await sources(it))["past"] == 0, "nothing was known as it came"
    live(past, 4, "127.0.0.1", max_tokens=2000)
    it.proxy.request_ended(waits, "cancelled")


@pytest.mark.parametrize(
    "options",
    [{"order": {"name": "fcfs"}}, {"order": {"name": "boost"}, "past": PastOptions(keys=0)}],
)
async def test_an_order_of_arrival_or_no_past_keeps_nothing(
    tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    async with cluster(tokenizer, 1, **options) as it:
        for _ in range(2):
            assert (await it.post(ASKED))[0] == 200
        assert it.proxy._past is None
        assert await sources(it) == {"prompt": 0, "past": 0, "both": 0, "none": 2}


async def test_a_proxy_goes_on_after_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    past = PastOptions(file=str(tmp_path / "past"))
    for expected in (1, 0):
        async with cluster(tokenizer, 1, order={"name": "boost"}, past=past) as it:
            assert (await it.post(ASKED))[0] == 200
            assert (await sources(it))["none"] == expected
    assert PROMPT.encode() not in (tmp_path / "past").read_bytes()


@pytest.mark.cluster(order={"name": "shortest"})
async def test_several_answers_to_one_prompt_teach_their_mean(it: Cluster) -> None:
    async def script(http: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 9, "completion_tokens": 80}
        return web.json_response({"choices": [], "usage": usage})

    it.set_decodes(script=script)
    assert (await it.post({**ASKED, "n": 2, "max_tokens": 90}))[0] == 200
    assert it.proxy._past is not None
    assert not it.proxy._past._running
    (own,) = it.proxy._past.memory._clients.values()
    assert own.mean == pytest.approx(math.log(40))
