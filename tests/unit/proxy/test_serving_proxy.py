"""The proxy before scripted engines: every failure, and no token lost, repeated or changed."""

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from scripted_cluster import PROMPT, Cluster, cluster, text_of, tokens_of, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.demo.load import metric_by
from rescheduler.placement.placeable import MoveOutcome
from rescheduler.placement.request_states import Copying, Freezing, Frozen


async def test_a_request_is_prefilled_in_one_place_and_decoded_in_another(it: Cluster) -> None:
    chunks = await it.answered(20)
    assert text_of(chunks) == it.tokenizer.decode(it.expected(20))
    assert sum(engine.pulled for engine in it.decodes) == 1
    prefill = it.engines["prefill-0"].bodies[0]
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert prefill["kv_transfer_params"]["headway"]["max_tokens"] == 20


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.cluster(decodes=3, prefix_caching=False)
async def test_moves_at_random_tokens_change_nothing(it: Cluster, path: str, stream: bool) -> None:
    random_ = random.Random(5)
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(4):
        cuts = sorted(random_.sample(range(1, 50), 3))
        outcomes: list[str] = []

        async def mover(cuts: list[int] = cuts, outcomes: list[str] = outcomes) -> None:
            for cut in cuts:
                while not any(r.generated_tokens >= cut and r.can_move for r in it.requests()):
                    await asyncio.sleep(0.001)
                outcomes.append(await it.move())

        body = {"prompt": PROMPT, "messages": messages, "max_tokens": 120}
        prompt = PROMPT if path == "/v1/completions" else json.dumps(messages)
        moving = asyncio.create_task(mover())
        options = {"stream_options": {"include_usage": True}}
        if stream:
            chunks = await it.stream({**body, **options}, path=path)
            assert tokens_of(chunks) == it.expected(120, prompt)
            assert text_of(chunks) == it.tokenizer.decode(it.expected(120, prompt))
            assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
            roles = [c["choices"][0].get("delta", {}) for c in chunks if c["choices"]]
            assert sum("role" in delta for delta in roles) == ("chat" in path)
            usage = chunks[-1]["usage"]
        else:
            asked = {**body, "model": "m", "return_token_ids": True}
            _, answer, headers = await it.post(asked, path)
            assert answer["choices"][0]["token_ids"] == it.expected(120, prompt)
            assert answer["id"].endswith(headers["X-Request-Id"])
            usage = answer["usage"]
        await moving
        assert outcomes == ["moved"] * 3
        assert usage["completion_tokens"] == 120
        assert usage["prompt_tokens"] == len(it.tokenizer.encode(prompt).ids)
        await it.idle()
    assert sum(engine.pulled for engine in it.decodes) == 4 * 4  # a prefill and 3 moves
    assert sum(engine.recomputed for engine in it.decodes) == 0


@pytest.mark.cluster(prefix_caching=False)
async def test_a_stop_string_across_a_move_ends_the_request(it: Cluster) -> None:
    whole = it.tokenizer.decode(it.expected(60))
    parts = [it.tokenizer.decode(it.expected(n)) for n in range(61)]
    stop = whole[len(parts[20]) - 2 : len(parts[40]) + 1]  # begins early, ends late

    it.set_decodes(stalls_at=15)

    async def at(tokens: int) -> None:
        if tokens == 10:
            moving = asyncio.create_task(it.move())
            await until(lambda: any(r.freezing for e in it.decodes for r in e.running.values()))
            it.set_decodes(stalls_at=0)
            assert await moving == "moved"

    body = {"prompt": PROMPT, "max_tokens": 60, "stop": [stop]}
    chunks = await it.stream({**body, "stream_options": {"include_usage": True}}, at)
    assert text_of(chunks) == whole[: whole.index(stop)]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["choices"][0]["stop_reason"] == stop
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokens_of(chunks)) < 60


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.cluster(prefix_caching=False)
async def test_a_stop_string_in_the_last_tokens_of_a_second_freeze_ends_the_request(
    it: Cluster, last: int
) -> None:
    whole = it.tokenizer.decode(it.expected(60))
    parts = [it.tokenizer.decode(it.expected(n)) for n in range(61)]
    stop = whole[len(parts[20]) : len(parts[40 + last])]  # a frozen engine gives two more

    async def moved(at: int) -> str:
        moving = asyncio.create_task(it.move())
        await until(lambda: any(r.freezing for e in it.decodes for r in e.running.values()))
        it.set_decodes(stalls_at=at)
        return await moving

    outcomes: list[str] = []

    async def mover() -> None:
        for at, then in ((15, 40), (40, 0)):
            await until(
                lambda at=at: any(r.generated_tokens == at and r.can_move for r in it.requests())
            )
            outcomes.append(await moved(then))

    it.set_decodes(stalls_at=15)
    moving = asyncio.create_task(mover())
    body = {"prompt": PROMPT, "max_tokens": 60, "stop": [stop]}
    chunks = await it.stream({**body, "stream_options": {"include_usage": True}})
    await moving
    assert outcomes[0] == "moved"
    assert text_of(chunks) == whole[: whole.index(stop)]
    assert chunks[-2]["choices"][0]["stop_reason"] == stop
    assert chunks[-1]["usage"]["completion_tokens"] == 40 + last
    await it.idle()


@pytest.mark.parametrize("how", ["breaks", "stalls", "errs", "dies"])
@pytest.mark.cluster(token_seconds=1.0)
async def test_an_instance_that_fails_is_replaced_without_a_changed_token(
    it: Cluster, how: str
) -> None:
    async def fail(engine: ScriptedEngine) -> None:
        if how == "dies":
            await engine.stop()
        else:
            setattr(engine, f"{how}_at", 15)

    chunks, _ = await it.answered_despite(40, fail)
    assert text_of(chunks) == it.tokenizer.decode(it.expected(40))


async def test_a_connection_that_breaks_after_the_last_token_does_no_harm(it: Cluster) -> None:
    it.set_decodes(breaks_after_the_end=True)
    await it.answered(10)
    assert len(it.asked) == 1


@pytest.mark.cluster(probe_seconds=30.0)
async def test_what_was_placed_on_a_dead_instance_goes_elsewhere(it: Cluster) -> None:
    await it.engines["decode-0"].stop()
    await asyncio.gather(*(it.answered(10, prompt=f"{PROMPT} {i}") for i in range(6)))
    assert it.engines["decode-1"].recomputed == 0  # the prefill was not wasted


@pytest.mark.cluster(control_seconds=0.5)
async def test_without_a_decode_instance_new_requests_learn_when_to_try_again(it: Cluster) -> None:
    for engine in it.decodes:
        await engine.stop()
    await until(lambda: not it.proxy.ready)
    status, answer, headers = await it.post({"model": "m", "prompt": PROMPT})
    assert status == 503
    assert int(headers["Retry-After"]) >= 1
    assert "no decode instance" in answer["error"]["message"]


@pytest.mark.cluster(decodes=1, control_seconds=0.5)
async def test_a_running_request_waits_for_an_instance_to_come_back(it: Cluster) -> None:
    async def at(tokens: int) -> None:
        if tokens == 10:
            await it.decodes[0].stop()
            asyncio.get_running_loop().call_later(
                0.3, lambda: restarts.append(asyncio.ensure_future(it.decodes[0].start()))
            )

    restarts: list[asyncio.Future[Any]] = []
    await it.answered(30, at)


async def test_without_a_prefill_instance_the_decode_instance_prefills(it: Cluster) -> None:
    await it.engines["prefill-0"].stop()
    await it.answered(10)


class FailedMove(NamedTuple):
    """A move, and what its engines do meanwhile.

    Attributes:
        outcome: of the move.
        target: what becomes of the engine that the request is to move to.
        source: of the one that runs it.
        options: of the proxy.
        keeps: an engine keeps something, until its time to live ends.
    """

    outcome: str
    target: Mapping[str, Any] = {}
    source: Mapping[str, Any] = {}
    options: Mapping[str, float] = {}
    keeps: bool = False


DEAD = {"fails": 500, "spares_copies": True}
HANGING = {"hangs": True, "spares_copies": True}
SHORT = {"moved_token_seconds": 0.2}
SILENT = {"freeze_seconds": 0.5, "control_seconds": 0.5}
FAILED_MOVES = {
    "deaf target": FailedMove("no_room", {"deaf": True}, options={"control_seconds": 1.0}),
    "full target": FailedMove("no_room", {"full": True}),
    "copy hangs": FailedMove("not_copied", {"hangs": True}, options=SHORT, keeps=True),
    "copy fails": FailedMove("not_copied", {"fails": 500}, options=SHORT, keeps=True),
    "no token": FailedMove("rolled_back", HANGING, options={"moved_token_seconds": 2.0}),
    "dead target": FailedMove("rolled_back", DEAD, options={"probe_seconds": 30.0}, keeps=True),
    "no freeze": FailedMove("not_frozen", source={"never_freezes": True}),
    "deaf source": FailedMove("no_answer", source={"deaf_to_freezes": True}, options=SILENT),
    "other tokens": FailedMove("rolled_back", source={"lies": True}),
}


@pytest.mark.parametrize("name", FAILED_MOVES)
async def test_a_request_whose_move_fails_goes_on_where_it_was_without_a_changed_token(
    tokenizer: Tokenizer, name: str
) -> None:
    failed = FAILED_MOVES[name]
    async with cluster(tokenizer, **failed.options) as it:

        def fail(source: ScriptedEngine, target: ScriptedEngine) -> None:
            vars(source).update(failed.source)
            vars(target).update(failed.target)

        _, outcome = await it.moved(300, fail, at=30)
        assert outcome == failed.outcome
        asked = sorted(sum("stream" in body for body in engine.bodies) for engine in it.decodes)
        if outcome == "rolled_back":
            assert asked[-1] == 2, "it went on where it had been"
        else:
            assert asked == [0, 1], "it has not been disturbed"
        for engine in it.decodes:
            engine.hangs = False
            if failed.keeps:
                engine.kept.clear()


@pytest.mark.parametrize("last", range(1, 8))
async def test_a_freeze_that_races_the_natural_end_changes_nothing(it: Cluster, last: int) -> None:
    chunks, outcome = await it.moved(10 + last)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert outcome != "rolled_back"


async def test_a_request_is_copied_while_it_decodes(it: Cluster) -> None:
    _, outcome = await it.moved(300, at=100, cache_salt="s")
    assert outcome == "moved"
    target = next(engine for engine in it.decodes if engine.copied)
    (copied,) = target.copied
    assert len(copied) >= 96
    asked, resumed = target.bodies
    assert asked["prompt"] == copied == resumed["prompt"][: len(copied)]
    assert asked["cache_salt"] == "s" and asked["max_tokens"] == 1


@pytest.mark.parametrize(
    "moment", ["prefill", "end of the prefill", "first token", "decode", "copy", "freeze"]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_everything(
    it: Cluster, moment: str, stream: bool
) -> None:
    prefill = it.engines["prefill-0"]
    prefill.hangs = moment == "prefill"
    prefill.answers_late = moment == "end of the prefill"
    it.set_decodes(hangs=moment == "first token")
    body = {"prompt": PROMPT, "max_tokens": 5000, "model": "m", "stream": stream}
    asking = asyncio.create_task(it.post(body))
    if moment == "prefill":
        await until(lambda: len(prefill.bodies) == 1)
    elif moment == "end of the prefill":
        await until(lambda: bool(prefill.kept))
    elif moment == "first token":
        await until(lambda: any(engine.running for engine in it.decodes))
    else:
        await until(lambda: any(request.can_move for request in it.requests()))
    if moment == "copy":
        it.source_and_target()[1].hangs = True
    if moment in ("copy", "freeze"):
        moving = asyncio.create_task(it.move())
        reached = Copying if moment == "copy" else (Freezing, Frozen)
        await until(lambda: any(isinstance(one.state, reached) for one in it.requests()))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: it.proxy.running == 0)
    it.set_engines(hangs=False)  # and so ends the prefill of a client that has left
    if moment == "copy":
        assert await moving == "gone"
    await it.idle()
    if moment == "freeze":
        await moving


@pytest.mark.cluster(pool=2, prefill_concurrency=1)
async def test_a_full_pool_is_refused_with_a_time_to_try_again(it: Cluster) -> None:
    it.engines["prefill-0"].hangs = True
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
    waiting = [asyncio.create_task(it.post(body)) for _ in range(3)]
    await until(lambda: it.proxy.cluster.dispatcher.waiting_for_prefill == 2)
    status, answer, headers = await it.post(body)
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert answer["error"]["code"] == 429
    it.engines["prefill-0"].hangs = False
    assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 3


@pytest.mark.cluster(pool=17)
async def test_how_much_may_wait_and_what_engines_hold_are_measured(it: Cluster) -> None:
    engine, used = it.engines["decode-1"], "headway_proxy_kv_cache_used_blocks"

    def read(name: str, **labels: str) -> dict[str, float]:
        return metric_by(it.proxy.metrics.text().decode(), name, "instance_name", **labels)

    assert read("headway_proxy_max_num_requests_waiting") == {"": 17}
    assert read(used) == {"prefill-0": 0, "decode-0": 0, "decode-1": 0}
    engine.full = True
    await until(lambda: read(used, role="decode") == {"decode-0": 0, "decode-1": 1000})
    engine.fails = 503  # what it holds while it is out of service is not known
    await until(lambda: read(used, role="decode") == {"decode-0": 0})


@pytest.mark.parametrize("pinned", [{}, {"n": 2}])
@pytest.mark.cluster(decodes=3)
async def test_what_one_instance_turns_away_another_one_takes(
    it: Cluster, pinned: dict[str, int]
) -> None:
    for engine in it.decodes[:2]:
        engine.fails = 429
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}
    for _ in range(6):  # more than would take an instance out of service
        status, answer, _ = await it.post({**body, **pinned})
        assert status == 200
        assert pinned or answer["choices"][0]["token_ids"] == it.expected(5)
    assert it.in_service
    turned_away = "headway_proxy_turned_away_requests_total"
    assert await it.metric(turned_away, instance_name="decode-0") > 0


@pytest.mark.parametrize("pinned", [{}, {"n": 2}])
async def test_what_all_instances_turn_away_is_told_when_to_try_again(
    it: Cluster, pinned: dict[str, int]
) -> None:
    it.set_decodes(fails=429)
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
    status, answer, headers = await it.post({**body, **pinned})
    assert status == 429
    assert headers["Retry-After"] == "7"
    assert answer["error"]["code"] == 429
    asked = [[body["model"] for body in engine.bodies] for engine in it.decodes]
    assert [models.count("m") for models in asked] == [1, 1]
    it.set_decodes(fails=0)
    assert it.in_service
    assert (await it.post({**body, **pinned}))[0] == 200


async def test_what_an_engine_refuses_is_told_as_it_says_it(it: Cluster) -> None:
    status, answer, _ = await it.post({"model": "other", "prompt": PROMPT})
    assert (status, answer["error"]["param"]) == (404, "model")
    body = {"model": "other", "prompt": PROMPT, "stream": True}
    assert (await it.post(body))[0] == 404


@pytest.mark.parametrize(
    "special", [{"n": 2}, {"best_of": 2}, {"echo": True}, {"prompt_logprobs": 1}]
)
async def test_what_cannot_move_is_handed_to_one_instance_as_it_is(
    it: Cluster, special: dict[str, Any]
) -> None:
    asked = {"model": "m", "prompt": PROMPT, "max_tokens": 3, **special}
    status, _, _ = await it.post(asked)
    assert status == 200
    (body,) = it.asked
    assert "kv_transfer_params" not in body
    assert body["max_tokens"] == 3
    assert it.engines["prefill-0"].bodies == []


@pytest.mark.cluster(control_seconds=0.5, token_seconds=1.0)
async def test_a_whole_answer_is_waited_for_as_long_as_its_engine_makes_steps(it: Cluster) -> None:
    it.set_decodes(hangs=True)
    body = {"model": "m", "prompt": PROMPT, "n": 2, "max_tokens": 3}
    asking = asyncio.create_task(it.post(body))
    while not (busy := [engine for engine in it.decodes if engine.bodies]):
        await asyncio.sleep(0.01)
    for engine in it.decodes:
        engine.hangs = engine is busy[0]
    status, _, _ = await asking
    assert status == 200
    asked = [body for body in it.asked if body.get("n") == 2]
    assert len(asked) == 2
    busy[0].hangs = False


async def test_draining_moves_running_streams_and_lets_none_in(it: Cluster) -> None:
    it.set_decodes(token_seconds=0.1)  # no stream ends before it has moved
    streams = [asyncio.create_task(it.answered(300, prompt=f"{PROMPT} {i}")) for i in range(8)]
    await until(lambda: len(it.asked) == 8)
    _, instance = await it.admin("POST", "drain/decode-0")
    assert instance["draining"]
    assert instance["requests"] > 0
    async with asyncio.timeout(120):
        while instance["requests"]:
            await asyncio.sleep(0.02)
            instance = (await it.admin("GET", "instances"))[1]["instances"][1]
    assert not all(stream.done() for stream in streams)
    it.set_decodes(token_seconds=0.002)
    before = len(it.engines["decode-0"].bodies)
    await it.stream({"prompt": PROMPT, "max_tokens": 3})
    assert len(it.engines["decode-0"].bodies) == before
    await asyncio.gather(*streams)
    assert not (await it.admin("POST", "undrain/decode-0"))[1]["draining"]
    status, answer = await it.admin("POST", "drain/nobody")
    assert status == 404
    assert "decode-0" in answer["error"]["message"]


@pytest.mark.cluster(control_seconds=0.5)
async def test_a_draining_instance_serves_while_all_others_are_out_of_service(it: Cluster) -> None:
    other, draining = it.decodes
    assert (await it.admin("POST", f"drain/{draining.name}"))[0] == 200
    await other.stop()
    await until(lambda: not it.proxy.cluster.instances[other.name].breaker.closed)
    await it.answered(10)
    await other.start()
    await until(lambda: it.proxy.cluster.instances[other.name].breaker.closed)
    served = len(draining.bodies)
    await it.stream({"prompt": PROMPT, "max_tokens": 10})
    assert len(draining.bodies) == served
    await it.admin("POST", f"drain/{other.name}")
    assert (await it.post({"model": "m", "prompt": PROMPT}))[0] == 503


@pytest.mark.cluster(decodes=1)
async def test_a_drained_instance_with_nobody_beside_it_finishes_its_requests(it: Cluster) -> None:
    async def at(tokens: int) -> None:
        if tokens == 5:
            await it.admin("POST", "drain/decode-0")

    await it.answered(60, at)


async def test_the_planner_moves_requests_from_a_crowded_instance(tokenizer: Tokenizer) -> None:
    planner = {"name": "star", "prediction": False, "interval_seconds": 0.05}
    async with cluster(tokenizer, migration=planner) as it:
        await it.admin("POST", "drain/decode-1")
        prompts = [f"{PROMPT} {i} " * (9 - i) for i in range(8)]
        streams = [asyncio.create_task(it.answered(400, prompt=one)) for one in prompts]
        await until(lambda: len(it.engines["decode-0"].bodies) == 8)
        assert not it.engines["decode-1"].running
        await it.admin("POST", "undrain/decode-1")
        await asyncio.gather(*streams)
        assert it.engines["decode-1"].pulled > 0
        moved = {"outcome": "moved", "source": "decode-0", "target": "decode-1"}
        assert await it.metric("headway_proxy_migrations_total", **moved) > 0


@pytest.mark.cluster(decodes=3, attempts=20, freeze_seconds=1.0, control_seconds=1.0)
async def test_a_storm_of_moves_failures_and_cancels_loses_nothing(it: Cluster) -> None:
    random_ = random.Random(11)
    asked = [it.answered(random_.randint(20, 150), prompt=f"{PROMPT} {i}") for i in range(40)]
    streams = [asyncio.create_task(one) for one in asked]
    decodes = [i for i in it.proxy.cluster.all if i.instance.role == "decode"]
    moves: set[asyncio.Task[MoveOutcome]] = set()
    for step in range(150):
        await asyncio.sleep(0.004)
        requests = [r for i in decodes for r in it.proxy.cluster.placements.on(i) if r.can_move]
        if requests:
            request, target = random_.choice(requests), random_.choice(decodes)
            moves.add(asyncio.create_task(it.proxy.migrator.move(request, target, "storm")))
        if step % 10 == 0:
            random_.choice(streams[:10]).cancel()
        if step == 60:
            await it.engines["decode-0"].stop()
    finished = await asyncio.gather(*streams, return_exceptions=True)
    for ended in finished:
        assert isinstance(ended, list | asyncio.CancelledError), ended
    outcomes = [move.outcome for move in await asyncio.gather(*moves)]
    assert outcomes.count("moved") > 10
    for engine in it.engines.values():
        engine.kept.clear()  # kept for the dead instance: time to live ends


async def test_other_endpoints_are_one_instances_and_come_back_byte_for_byte(it: Cluster) -> None:
    asked = {"model": "m", "input": ["a", {"b": 1}], "max_output_tokens": 9}
    status, answer, _ = await it.post(asked, "/v1/responses")
    assert (status, answer) == (200, {"asked": asked, "path": "/v1/responses"})
    async with it.session.post(it.url + "/v1/responses", json=asked | {"stream": True}) as got:
        assert got.content_type == "text/event-stream"
        events = "".join(f'event: a.delta\ndata: {{"n": {n}}}\n\n' for n in range(3))
        events += 'event: end\ndata: {"type": "response.completed"}\n\n'
        assert (await got.read()).decode() == events
    status, answer, _ = await it.post({"prompt": "a"}, "/tokenize")
    assert (status, answer["asked"]) == (200, {"prompt": "a"})
    assert it.engines["prefill-0"].bodies == []
    it.decodes[0].fails = it.decodes[1].fails = 404
    status, answer, _ = await it.post({"model": "m"}, "/v1/responses")
    assert (status, answer) == (404, {"error": {"message": "scripted"}})


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/v1/completions", [1], 400, "not a valid JSON object"),
        ("/v1/completions", {"kv_transfer_params": {}}, 400, "set by the proxy"),
        ("/v1/completions", {"vllm_xargs": {"kv_transfer_params": ""}}, 400, "set by the proxy"),
        ("/v1/nowhere", {}, 404, "Not Found"),
        ("/v1/models", {}, 405, "Method Not Allowed"),
        ("/v1/responses", {"background": True}, 400, "`background` is not supported"),
        ("/v1/responses", {"previous_response_id": "r"}, 400, "`previous_response_id` is not"),
        ("/v1/responses", {"kv_transfer_params": {}}, 400, "set by the proxy"),
        ("/v1/responses/abc", {}, 501, "a response is not kept"),
        ("/v1/audio/transcriptions", {}, 501, "forms are not routed"),
    ],
)
async def test_what_is_not_served_says_why(
    it: Cluster, path: str, body: Any, status: int, told: str
) -> None:
    got, answer, _ = await it.post(body, path)
    assert (got, answer["error"]["code"]) == (status, status)
    assert told in answer["error"]["message"]
