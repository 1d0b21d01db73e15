"""A batch against servers that are down, full, broken, or refuse, and through the real proxy."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from chosen_ports import free_port
from coordinated_cluster import Coordinated
from scripted_cluster import cluster
from tokenizers import Tokenizer

from rescheduler.batch.batch import BatchSender, BatchStoppedError, batch, server_address
from rescheduler.batch.batch_files import SERVED, BatchFileError, BatchOutput, read_batch

Answering = Callable[[dict[str, Any], int], Awaitable[web.StreamResponse]]
"""Answers a body that comes for the n-th time, from 0."""


def asked(folder: Path, n: int, models: tuple[str, ...] = ("m",)) -> Path:
    """Write so many requests, to the models in turns."""
    path = folder / "x.jsonl"
    lines = [
        {
            "custom_id": f"n-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{i}", "model": models[i % len(models)]},
        }
        for i in range(n)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def answered(body: dict[str, Any]) -> web.Response:
    usage = {"completion_tokens": 3}
    answer = {"choices": [{"text": f"answer to {body['prompt']}"}], "usage": usage}
    return web.Response(
        text=json.dumps(answer, indent=1),
        content_type="application/json",
        headers={"X-Request-Id": "r"},
    )


@asynccontextmanager
async def server(answering: Answering, port: int = 0) -> AsyncIterator[str]:
    """Run a server; its address."""
    times: dict[str, int] = {}

    async def handle(http: web.Request) -> web.StreamResponse:
        body = await http.json()
        assert body["service_tier"] == "flex"
        n = times[body["prompt"]] = times.get(body["prompt"], -1) + 1
        return await answering(body, n)

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    port = port or free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await asyncio.sleep(0.01)  # what is being accepted is closed as well
        await runner.cleanup()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits that are short, and the signal handlers of before."""
    monkeypatch.setattr("rescheduler.batch.batch._FIRST_WAIT", 0.01)
    monkeypatch.setattr("rescheduler.batch.batch._LONGEST_WAIT", 0.05)
    monkeypatch.setattr("rescheduler.batch.batch._LOOK_SECONDS", 0.02)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def sent(path: Path, url: str, give_up: float | None = None, at_once: int = 3) -> bool:
    requests = read_batch(path)
    with BatchOutput(requests, path.with_name("x.results.jsonl")) as output:
        return await BatchSender(requests, output, url, give_up).run(at_once)


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(folder: Path) -> dict[str, str]:
    found = lines_of(folder / "x.results.jsonl")
    answers = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in found}
    assert len(answers) == len(found)
    return answers


def errors(folder: Path) -> dict[str, int]:
    found = lines_of(folder / "x.errors.jsonl")
    return {one["custom_id"]: one["response"]["status_code"] for one in found}


async def test_every_request_gets_its_own_answer(tmp_path: Path) -> None:
    running = most = 0

    async def answering(body: dict[str, Any], n: int) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return answered(body)

    async with server(answering) as url:
        assert await sent(asked(tmp_path, 20), url)
        assert texts(tmp_path) == {f"n-{i}": f"answer to {i}" for i in range(20)}
        assert most == 3
        assert await sent(tmp_path / "x.jsonl", url), "nothing is left to do"
    assert len(texts(tmp_path)) == 20


async def test_whatever_is_not_final_is_sent_again(tmp_path: Path) -> None:
    """Each request first meets a trouble of its own."""

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        trouble = [429, 500, 502, 503, 408, 200, 0][int(body["prompt"])]
        if n > 1:
            return answered(body)
        if not trouble:
            # Its body never comes.
            return web.StreamResponse(headers={"Content-Length": "100"})
        if trouble == 200:
            return web.Response(text='{"choices": [')
        return web.json_response({"error": {}}, status=trouble, headers={"Retry-After": "0.01"})

    async with server(answering) as url:
        assert await sent(asked(tmp_path, 7), url)
    assert len(texts(tmp_path)) == 7
    assert errors(tmp_path) == {}


@pytest.mark.parametrize(
    ("requests", "refused"),
    [
        (5, {0: 400, 1: 404, 2: 413, 3: 501, 4: 422}),
        (20, {3: 403, 7: 404, 8: 404, 19: 404}),  # a few refusals among answers
    ],
)
async def test_what_is_refused_is_an_error_that_is_not_sent_again(
    tmp_path: Path, requests: int, refused: dict[int, int]
) -> None:
    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        assert n == 0
        status = refused.get(int(body["prompt"]))
        if status == 422:
            return web.Response(text="what\nis this?", status=422)
        if status is not None:
            return web.json_response({"error": {"message": "no"}}, status=status)
        return answered(body)

    async with server(answering) as url:
        assert await sent(asked(tmp_path, requests), url)
        assert await sent(tmp_path / "x.jsonl", url)
    assert errors(tmp_path) == {f"n-{i}": status for i, status in refused.items()}
    assert len(texts(tmp_path)) == requests - len(refused)


@pytest.mark.parametrize(
    ("how", "alone", "status"),
    [
        ("unreadable", False, 502),
        ("unreadable", True, 502),
        ("error", False, 500),
        ("error", True, 500),
        ("broken", False, 502),  # as where the server itself dies of it
        ("closed", False, 502),
    ],
)
async def test_a_request_that_breaks_the_server_is_given_up_in_the_end(
    tmp_path: Path, how: str, alone: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times while others are answered, or for long."""
    tries = 0
    if alone:
        monkeypatch.setattr("rescheduler.batch.batch._OWN_FAULT_SECONDS", 0.3)

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        nonlocal tries
        if body["prompt"] != "1":
            await asyncio.sleep(0.02)
            return answered(body)
        tries += 1
        if how == "unreadable":
            return web.Response(body=b'{"choices": [{"text": "\xff"}]}')
        if how == "error":
            return web.json_response({"error": {"message": "poisoned"}}, status=500)
        if how == "broken":
            # Its body never comes.
            return web.StreamResponse(headers={"Content-Length": "100"})
        raise asyncio.CancelledError

    others = 2 if alone else 400
    async with server(answering) as url:
        assert await sent(asked(tmp_path, others + 1), url)
    assert errors(tmp_path) == {"n-1": status}
    # One that may have come before it was sent, or since which nobody was answered, does not count.
    assert alone or 5 <= tries <= 10
    assert len(texts(tmp_path)) == others


async def test_a_server_that_starts_for_long_loses_no_request(tmp_path: Path) -> None:
    """Nothing is answered meanwhile: so the fault is not a request's own."""

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        return answered(body) if n > 25 else web.Response(status=502)

    async with server(answering) as url:
        assert await sent(asked(tmp_path, 3), url)
    assert (errors(tmp_path), len(texts(tmp_path))) == ({}, 3)


LOST = {"error": {"message": "two engines", "type": "UnprocessableEntityError", "code": 422}}


async def test_a_request_that_cost_two_engines_is_final_and_named(
    tmp_path: Path, headway_command: list[str]
) -> None:
    times = 0

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        nonlocal times
        if body["prompt"] == "1":
            times += 1
            return web.json_response(LOST, status=422)
        return answered(body)

    path = asked(tmp_path, 4)
    path.write_text(path.read_text().replace("n-1", r"n-1\u001b\n"))
    async with server(answering) as url:
        for _ in range(2):
            program = await asyncio.create_subprocess_exec(
                *headway_command, "batch", str(path), "--url", url, stdout=asyncio.subprocess.PIPE
            )
            said = (await program.communicate())[0].decode()
            assert program.returncode == 3
            assert "1 of them must not be sent again: under each the server lost two" in said
            assert "(HTTP 422): n-1\\x1b\\n\n" in said
    assert times == 1
    assert errors(tmp_path) == {"n-1\x1b\n": 422}


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405, 407, 421])
@pytest.mark.parametrize("at_once", [1, 64])
async def test_a_server_that_refuses_everything_stops_it_without_an_error(
    tmp_path: Path, status: int, at_once: int
) -> None:
    """Engines come back with another key or name after 50 of 200."""
    refuses, came = True, 0

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        nonlocal came
        came += 1
        if refuses and came > 50:
            return web.json_response({"error": {"message": "who are you"}}, status=status)
        return answered(body)

    path = asked(tmp_path, 200)
    async with server(answering) as url:
        said = (
            rf"/completions, model \"m\": the server answers HTTP {status}, 5 times in a row: .*who"
        )
        with pytest.raises(BatchStoppedError, match=said) as stopped:
            await sent(path, url, at_once=at_once)
        assert "150 requests are left, none of these counts as an error" in str(stopped.value)
        assert came <= 50 + 5 + at_once
        assert (len(texts(tmp_path)), errors(tmp_path)) == (50, {})
        refuses = False
        assert await sent(path, url)
    assert (len(texts(tmp_path)), errors(tmp_path)) == (200, {})


async def test_requests_to_another_model_go_on(tmp_path: Path) -> None:
    """A model that is gone costs the others nothing."""

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        if body["model"] == "gone":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        return answered(body)

    path = asked(tmp_path, 100, ("m", "gone"))
    async with server(answering) as url:
        with pytest.raises(BatchStoppedError, match=r'model "gone": .* 404, 5 times.* 50 requests'):
            await sent(path, url)
    assert (len(texts(tmp_path)), errors(tmp_path)) == (50, {})


async def test_a_wrong_key_is_never_an_error_of_a_request(tmp_path: Path) -> None:
    """Not even of the last one."""

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        if body["prompt"] in ("2", "4"):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return answered(body)

    async with server(answering) as url:
        with pytest.raises(BatchStoppedError, match=r"HTTP 401: .* 2 requests.* OPENAI_API_KEY"):
            await sent(asked(tmp_path, 5), url, at_once=1)
    assert (len(texts(tmp_path)), errors(tmp_path)) == (3, {})


@pytest.mark.parametrize("number", ["1e99", "-7", "7.5", '"7"', "true", "1" + "0" * 200, "[]"])
async def test_a_count_that_cannot_be_costs_nothing(
    tmp_path: Path, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are kept, and the next run reads them."""
    monkeypatch.setattr("rescheduler.batch.batch_progress._LOG_SECONDS", 0.0)

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        usage = f'{{"completion_tokens": {number}}}'
        return web.Response(text=f'{{"choices": [{{"text": "a"}}], "usage": {usage}}}')

    path = asked(tmp_path, 20)
    async with server(answering) as url:
        assert await sent(path, url)
        assert await sent(path, url)
    assert (len(texts(tmp_path)), errors(tmp_path)) == (20, {})


async def test_an_answer_that_is_too_large_is_an_error_of_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without an end; the others are answered, and large ones that are allowed."""
    monkeypatch.setattr("rescheduler.batch.batch.LARGEST_ANSWER", 4 << 20)

    async def without_end() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65536

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        number = int(body["prompt"])
        if number not in (2, 3, 5, 6):
            return answered(body)
        if number in (2, 6):
            return answered({"prompt": "x" * (3 << 20)})
        if number == 3:
            return answered({"prompt": "x" * (5 << 20)})
        return web.Response(body=without_end())

    path = asked(tmp_path, 8)
    async with server(answering) as url:
        assert await sent(path, url)
        assert await sent(path, url)
    assert errors(tmp_path) == {"n-3": 502, "n-5": 502}
    assert (tmp_path / "x.errors.jsonl").read_text().count("the answer has more than 4 MiB") == 2
    assert len(texts(tmp_path)["n-2"]) > 3 << 20
    assert len(texts(tmp_path)) == 6


async def test_a_large_answer_that_stalls_is_sent_again_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rescheduler.batch.batch._LARGE_SECONDS", 0.1)

    async def stalling() -> AsyncIterator[bytes]:
        yield b" " * (2 << 20)
        await asyncio.sleep(60)

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        if body["prompt"] in ("0", "1") and not n:
            return web.Response(body=stalling())
        return answered({"prompt": "x" * (2 << 20)}) if body["prompt"] == "2" else answered(body)

    async with server(answering) as url:
        assert await sent(asked(tmp_path, 6), url)
    assert (len(texts(tmp_path)), errors(tmp_path)) == (6, {})


async def test_a_large_refusal_is_kept_in_short(tmp_path: Path) -> None:
    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        return web.json_response({"error": {"message": "x" * (3 << 20)}}, status=400)

    async with server(answering) as url:
        assert await sent(asked(tmp_path, 3), url)
    assert errors(tmp_path) == {"n-0": 400, "n-1": 400, "n-2": 400}
    assert (tmp_path / "x.errors.jsonl").stat().st_size < 3000


async def test_a_redirection_stops_it(tmp_path: Path) -> None:
    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        return web.Response(status=301, headers={"Location": "https://elsewhere/v1"})

    async with server(answering) as url:
        with pytest.raises(BatchStoppedError, match="wants requests sent to https://elsewhere/v1"):
            await sent(asked(tmp_path, 3), url)
    assert errors(tmp_path) == {}


async def test_any_byte_may_come_in_a_header(tmp_path: Path) -> None:
    body = b'{"choices": [{"text": "a"}]}'
    head = b"HTTP/1.1 200 OK\r\nX-Request-Id: r\xff\r\nContent-Length: %d\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(head % len(body) + body)
        await writer.drain()
        writer.close()

    raw = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with raw:
        assert await sent(asked(tmp_path, 1), f"http://127.0.0.1:{raw.sockets[0].getsockname()[1]}")
    assert texts(tmp_path) == {"n-0": "a"}


async def test_a_server_that_comes_back_finds_the_batch_waiting(tmp_path: Path) -> None:
    port, path = free_port(), asked(tmp_path, 10)

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        return answered(body)

    sending = asyncio.create_task(sent(path, f"http://127.0.0.1:{port}"))
    await asyncio.sleep(0.2)
    assert not sending.done()
    async with server(answering, port):
        assert await sending
    assert len(texts(tmp_path)) == 10


async def test_a_batch_gives_up_when_asked_to(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(BatchStoppedError, match="nothing was answered for 0 s: ClientConnector"):
        await sent(asked(tmp_path, 3), url, give_up=0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_and_the_same_command_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    hangs = True

    async def answering(body: dict[str, Any], n: int) -> web.StreamResponse:
        if hangs and int(body["prompt"]) > 4:
            if body["prompt"] == "5":
                os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        return answered(body)

    path = asked(tmp_path, 10)
    async with server(answering) as url:
        assert not await sent(path, url)
        assert 3 <= len(texts(tmp_path)) <= 5
        hangs = False
        assert await sent(path, url)
    assert len(texts(tmp_path)) == 10


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_as_openais_does(ending: str) -> None:
    assert server_address(f"http://[::1]:8000{ending}") == "http://[::1]:8000"
    assert server_address(f"https://host/gateway{ending}") == "https://host/gateway"


def test_options_that_cannot_be(tmp_path: Path) -> None:
    path = asked(tmp_path, 1)
    with pytest.raises(ValueError, match="--concurrency must be at least 1, not 0"):
        batch(path, concurrency=0)
    with pytest.raises(ValueError, match="--give-up-seconds must be positive, not -1"):
        batch(path, give_up_seconds=-1)
    with pytest.raises(ValueError, match="--give-up-seconds must be positive, not nan"):
        batch(path, give_up_seconds=float("nan"))
    with pytest.raises(ValueError, match="--concurrency 1000000000: this process may open"):
        batch(path, concurrency=10**9)
    for url in (
        *("127.0.0.1:8000", "http://", "http:127.0.0.1:8000", "http://127.0.0.1:99999"),
        *("http://exa mple", "http://127.0.0.1:8000?x=1", "ftp://127.0.0.1"),
    ):
        with pytest.raises(ValueError, match="is not like http"):
            batch(path, url=url)
    path.write_text("{}")
    with pytest.raises(BatchFileError, match=r"x\.jsonl:1: "):
        batch(path)
    assert not (tmp_path / "x.results.jsonl").exists()


async def sent_through(
    folder: Path, url: str, *lines: tuple[str, dict[str, Any]]
) -> tuple[list[str], dict[str, int]]:
    """Send a body to each endpoint; what has an answer, and the status of each error."""
    path = folder / "x.jsonl"
    asked = [
        {"custom_id": f"{i} {url}", "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(lines)
    ]
    path.write_text("\n".join(map(json.dumps, asked)))
    assert await sent(path, url, 20.0)
    found = lines_of(folder / "x.results.jsonl")
    return sorted(one["custom_id"] for one in found), errors(folder)


async def test_every_endpoint_that_the_proxy_forwards_is_served(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    body = {"model": "m", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    async with cluster(tokenizer) as it:
        answered, errors = await sent_through(
            tmp_path, it.url, *((url, body | {"max_tokens": 2}) for url in SERVED)
        )
    assert errors == {}
    assert answered == sorted(f"{i} {url}" for i, url in enumerate(SERVED))


async def test_the_proxy_says_how_large_a_line_may_be(tokenizer: Tokenizer, tmp_path: Path) -> None:
    small = {"model": "m", "prompt": "Hi", "max_tokens": 2}
    large = {"model": "m", "prompt": "x" * (9 << 20)}
    async with cluster(tokenizer, largest_body_mb=8) as it:
        lines = ("/v1/completions", large), ("/v1/completions", small)
        answered, errors = await sent_through(tmp_path, it.url, *lines)
    assert (answered, errors) == (["1 /v1/completions"], {"0 /v1/completions": 413})


async def test_behind_a_coordinator_the_tier_of_the_batch_is_no_error_of_its_requests(
    many: Coordinated, tmp_path: Path
) -> None:
    body = {"model": "m", "prompt": "Hi", "max_tokens": 2}
    with pytest.raises(BatchStoppedError) as raised:
        await sent_through(tmp_path, many.proxies[0].url, *[("/v1/completions", body)] * 3)
    assert "serves no background requests" in str(raised.value)
    assert 'give each body "service_tier": "default"' in str(raised.value)
    assert (tmp_path / "x.errors.jsonl").read_bytes() == b""
    lines = [("/v1/completions", body | {"service_tier": "default"})] * 3
    answered, errors = await sent_through(tmp_path, many.proxies[0].url, *lines)
    assert (len(answered), errors) == (3, {})
