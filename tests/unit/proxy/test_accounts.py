"""Accounts: who a client is, what it has had, and what it may have where others wait."""

import asyncio
import json
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from live_requests import live_request
from scripted_cluster import Cluster, until

from rescheduler.engines.proxy_options import AccountOptions
from rescheduler.openai.request_reader import read_forwarded, read_request
from rescheduler.placement.account import Account
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.live_request import LiveRequest

POOL = 12
KEY = {"Authorization": "Bearer mine"}


@pytest.fixture
def table() -> Accounts:
    return Accounts(AccountOptions())


def asked(account: Account, foreseen: float = 10.0) -> LiveRequest:
    request = live_request("r")
    request.account, request.foreseen_tokens = account, foreseen
    request.prompt_tokens, request.prompt_is_known = 30, True
    return request


class TestWhoAClientIs:
    def test_an_address_until_an_engine_has_accepted_its_key(self, table: Accounts) -> None:
        table.refused_key()
        assert table.of("10.0.0.1", KEY).name == "10.0.0.1"
        table.keys.served(KEY)
        known = table.of("10.0.0.1", KEY)
        assert known is table.of("10.0.0.2", KEY), "wherever it comes from"
        assert known.name != "10.0.0.1" and "mine" not in known.name
        assert table.of("10.0.0.1", {"Authorization": "Bearer guess"}).name == "10.0.0.1"

    def test_a_key_is_one_however_its_scheme_is_written(self, table: Accounts) -> None:
        table.refused_key()
        table.keys.served(KEY)
        spellings = ("Bearer mine", "bearer mine", "BEARER  mine")
        names = {table.of("10.0.0.1", {"Authorization": one}).name for one in spellings}
        assert len(names) == 1 and "10.0.0.1" not in names

    def test_proxies_with_the_same_secret_call_a_key_alike(self) -> None:
        tables = [Accounts(AccountOptions(), True, salt=b"shared") for _ in range(2)]
        for table in tables:
            table.keys.served(KEY)
        assert len({table.of("10.0.0.1", KEY).name for table in tables}) == 1

    def test_nobody_is_many_by_keys_that_no_engine_checks(self, table: Accounts) -> None:
        keys = [{"Authorization": f"Bearer {i}"} for i in range(3)]
        for key in keys:
            table.keys.served(key)
        assert {table.of("10.0.0.1", key).name for key in keys} == {"10.0.0.1"}

    def test_a_header_says_who_where_one_is_configured(self) -> None:
        table = Accounts(AccountOptions(header="X-Tenant", weights={"big": 3.0}))
        assert table.of("10.0.0.1", {"X-Tenant": "big"}).weight == 3.0
        assert table.of("10.0.0.1", {"x-tenant": "small"}).name == "small"
        assert table.of("10.0.0.1", {}).name == "10.0.0.1"
        odd = table.of("10.0.0.1", {"X-Tenant": "\u202e" * 500}).name
        assert odd.isascii() and odd.isalnum(), "names go into messages and logs"

    def test_the_table_is_bounded_and_keeps_who_has_requests(self, table: Accounts) -> None:
        busy = table.named("busy")
        table.began(asked(busy))
        for i in range(5000):
            table.named(str(i))
        assert table.named("busy") is busy
        running = set()
        for i in range(3000):
            request = asked(table.named(f"r{i}"))
            table.began(request)
            running.add(request.account)
        assert len(running) < 2000, "the rest share one"
        assert len(table._accounts) <= 1025


def begun(table: Accounts, request: LiveRequest) -> None:
    table.began(request)
    table.placed(request)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=200))
def test_a_share_of_the_pool_is_anyones_and_twice_the_pool_is_hardly_passed(
    steps: list[tuple[str, bool]],
) -> None:
    table = Accounts(AccountOptions())
    waiting: list[tuple[Account, ExitStack]] = []
    for name, comes in steps:
        account = table.named(name)
        if not comes:
            if waiting:
                waiting.pop(0)[1].close()
            continue
        counts = Counter(one for one, _ in waiting)
        may = len(waiting) < POOL or table.may_wait(account, POOL)
        share = POOL // len({account, *counts})
        if counts[account] < share and len(waiting) < 2 * POOL:
            assert may, "below its share"
        if not counts[account]:
            assert may, "it has nothing there"
        if may:
            waiting.append((account, in_the_pool(table, account)))
        assert len(waiting) <= 2 * POOL + 4
        assert {one: one.waiting.total() for one, _ in waiting} == Counter(
            one for one, _ in waiting
        )
    for _, stack in waiting:
        stack.close()
    assert not table._waiting


def in_the_pool(table: Accounts, account: Account) -> ExitStack:
    request, stack = live_request("r"), ExitStack()
    request.account = account
    stack.enter_context(table.waits(request))
    return stack


def test_one_that_fills_the_pool_keeps_nobody_out(table: Accounts) -> None:
    flood = table.named("flood")
    held = [in_the_pool(table, flood) for _ in range(3 * POOL)]  # that came while there was room
    assert not table.may_wait(flood, POOL)
    assert table.may_wait(table.named("other"), POOL)
    for stack in held:
        stack.close()
    assert not flood.waiting


class TestService:
    def test_what_runs_is_charged_as_foreseen_and_what_has_ended_as_it_was(
        self, table: Accounts
    ) -> None:
        request = asked(table.named("a"), foreseen=60.0)
        request.max_tokens = 100
        begun(table, request)
        assert request.account.served(None) == 30 + 2 * 60
        request._generated = 100
        table.charge_outgrown()
        assert request.account.served(None) == 30 + 2 * 100, "it outlives its forecast"
        table.ended(request, by_itself=True)
        assert request.account.served(None) == 230

    @pytest.mark.parametrize("generated", [0, 500, 1_500, 2_000, 2_999])
    def test_what_goes_on_elsewhere_is_charged_as_a_whole(
        self, table: Accounts, generated: int
    ) -> None:
        request = asked(table.named("a"), foreseen=3_000.0)
        request.max_tokens, request._generated = 3_000, generated
        begun(table, request)
        assert request.account.served(None) == 30 + 2 * 3_000

    def test_a_request_of_one_token_costs_a_place(self, table: Accounts) -> None:
        """Otherwise whoever sends many has all places, and pays next to nothing."""
        request = asked(table.named("a"), foreseen=1.0)
        request.prompt_tokens = 1
        begun(table, request)
        assert request.account.served(None) == table.mean_service / 10
        request._generated = 1
        table.ended(request, by_itself=True)
        assert request.account.served(None) == table.mean_service / 10

    def test_what_runs_counts_as_an_account_begins_to_wait_anew(self, table: Accounts) -> None:
        """Otherwise it is ahead by that after each pause, and has less than its share."""
        table.virtual_times[None] = 1_000.0
        runs = asked(table.named("a"), foreseen=400.0)
        runs.max_tokens = 400
        begun(table, runs)
        with table.waits(asked(runs.account)):
            assert table.ahead(runs.account, None) == 0.0

    def test_a_request_costs_no_more_where_others_are_long(self, table: Accounts) -> None:
        table.mean_service = 50_000.0
        request = asked(table.named("a"), foreseen=1.0)
        begun(table, request)
        assert request.account.served(None) == 50

    def test_what_was_charged_too_much_is_no_claim_after_a_pause(self, table: Accounts) -> None:
        """Otherwise one long request that is given up saves up all that others have meanwhile."""
        saver, long = table.named("saver"), asked(table.named("saver"), foreseen=200_000.0)
        long.max_tokens = 200_000
        begun(table, long)
        table.virtual_times[None] = 100_000.0
        with table.waits(asked(saver)):
            assert table.ahead(saver, None) > 0
            long._generated = 5_000
            table.ended(long, by_itself=False)
            assert table.ahead(saver, None) >= 0

    @pytest.mark.parametrize("counted", [30, 3_000, 20_000], ids="a prompt of {} tokens".format)
    @pytest.mark.parametrize(
        ("tokens", "most", "least", "greatest"),
        [(2_000, 4_000, 20, 64), (20, 4_000, 1, 1), (10, 10, 1, 1)],
        ids=["longer", "as foreseen", "cut"],
    )
    def test_what_several_answers_were_wrong_by_is_learnt(
        self, table: Accounts, counted: int, tokens: int, most: int, least: int, greatest: int
    ) -> None:
        """By what their engine counts, whatever was thought of their prompt."""
        account = table.named("a")
        for _ in range(40):
            request = asked(account, foreseen=20.0)
            request.several, request.answers, request.max_tokens = True, 2, most
            request.prompt_tokens, request.prompt_is_known = 3_000, False
            begun(table, request)
            request.was_counted(counted, 2 * tokens)
            table.ended(request, by_itself=True)
        assert least <= account.correction <= greatest

    @pytest.mark.parametrize(
        ("prompt", "known", "charged"),
        [(30, True, 500), (4_000, True, 4_000), (4_000_000, False, 500)],
    )
    def test_what_an_engine_refused_has_had_a_place(
        self, table: Accounts, prompt: int, known: bool, charged: int
    ) -> None:
        """Otherwise who is refused would have had least, and each next place would be its own."""
        request = asked(table.named("a"))
        request.prompt_tokens, request.prompt_is_known = prompt, known
        begun(table, request)
        request.refused = True
        table.ended(request, by_itself=False)
        assert request.account.served(None) == charged and table.mean_service == 500

    def test_all_answers_of_a_request_are_charged(self, table: Accounts) -> None:
        request = asked(table.named("a"), foreseen=200.0)
        request.several = True
        request.answers = 64
        request.max_tokens = 4000
        begun(table, request)
        assert request.account.served(None) == 30 + 64 * 2 * 200
        table.ended(request, by_itself=True)
        assert request.account.served(None) == 30 + 64 * 2 * 200

    def test_one_client_does_not_say_how_much_a_request_is(self, table: Accounts) -> None:
        for name in ("a", "b", "c", "greedy"):
            for _ in range(100 if name == "greedy" else 1):
                request = asked(table.named(name))
                request.prompt_tokens = 30_000 if name == "greedy" else 100
                begun(table, request)
                request._generated = 100
                table.ended(request, by_itself=True)
        assert table.mean_service == 300

    @pytest.mark.parametrize("several", [True, False])
    def test_an_answer_that_nobody_counted_is_charged_as_it_was_expected(
        self, table: Accounts, several: bool
    ) -> None:
        request = asked(table.named("a"), foreseen=1000.0)
        request.several, request.max_tokens = several, 4000
        begun(table, request)
        table.ended(request, by_itself=True)
        assert request.account.served(None) == 30 + 2 * 1000

    @pytest.mark.parametrize("several", [True, False])
    def test_who_gives_up_before_a_place_to_decode_pays_for_its_prompt(
        self, table: Accounts, several: bool
    ) -> None:
        request = asked(table.named("a"), foreseen=1000.0)
        request.several, request.max_tokens = several, 4000
        request.prompt_tokens = prompt = 400
        table.began(request)
        table.placed(request, for_prefill=True)
        assert request.account.served(None) == prompt + 2 * 1000, "it is expected to be answered"
        table.ended(request, by_itself=False)
        assert request.account.served(None) == prompt

    def test_a_picture_is_no_million_tokens(self, table: Accounts) -> None:
        request = asked(table.named("a"))
        request.prompt_tokens, request.prompt_is_known = 1_048_576, False
        request.media_tokens = 1_048_500
        before = table.mean_service
        begun(table, request)
        assert request.account.served(None) <= before + 76 + 2 * 10
        table.ended(request, by_itself=False)
        assert table.mean_service == before

    def test_who_comes_late_has_no_claim_to_what_others_had_before(self, table: Accounts) -> None:
        early = asked(table.named("early"))
        early.account.settle(early, 1000.0)
        with table.waits(early):
            table.placed(early)
        late = asked(table.named("late"))
        with table.waits(late):
            assert late.account.served(None) == 1000.0

    def test_nobody_saves_up_service_by_a_request_that_never_ends(self, table: Accounts) -> None:
        saver, heavy = table.named("saver"), table.named("heavy")
        table.began(asked(saver))
        for _ in range(20):
            request = asked(heavy)
            table.began(request)
            with table.waits(request):
                table.placed(request)
            request._generated = 5000
            table.ended(request, by_itself=True)
        flood = asked(saver)
        with table.waits(flood):
            assert saver.served(None) > 0.9 * heavy.served(None)

    def test_a_forecast_of_what_is_left_unsaid_lifts_nobody(self, table: Accounts) -> None:
        liar = table.named("liar")
        for _ in range(20):
            liar.learn(10.0, 1000, by_itself=True)
        requests = [asked(liar, foreseen=500.0) for _ in range(50)]
        for request in requests:
            request.max_tokens = 500
            with table.waits(request):
                table.placed(request)
        assert liar.served(None) <= 50 * (30 + 2 * 500), "never more than it may generate"
        new = asked(table.named("new"))
        with table.waits(new):
            assert new.account.served(None) == 0.0

    def test_what_some_instances_serve_is_no_debt_to_others(self, table: Accounts) -> None:
        table.group_of = lambda model: model
        heavy = asked(table.named("heavy"))
        heavy.model = heavy.group = "large"
        heavy.account.settle(heavy, 1_000_000.0)
        with table.waits(heavy):
            table.placed(heavy)
        steady, new = asked(table.named("steady")), asked(table.named("new"))
        steady.model = new.model = "small"
        with table.waits(steady):
            assert steady.account.served("small") == 0.0
            guest = asked(table.named("heavy"))
            guest.model = "small"
            with table.waits(guest):
                table.placed(guest)
            with table.waits(new):
                assert new.account.served("small") == 0.0
                assert table.ahead(new.account, "small") == table.ahead(steady.account, "small")

    def test_who_waits_for_some_instances_saves_up_nothing_for_others(
        self, table: Accounts
    ) -> None:
        table.group_of = lambda model: model
        honest = asked(table.named("honest"))
        honest.model = honest.group = "m"
        honest.account.settle(honest, 1000.0)
        with table.waits(honest):
            table.placed(honest)
        decoy, real = asked(table.named("late")), asked(table.named("late"))
        decoy.model, real.model = "other", "m"
        with table.waits(decoy), table.waits(real):
            assert table.ahead(real.account, "m") == 0.0
            assert real.account.served("m") == 1000.0

    def test_a_long_request_holds_back_nobodys_virtual_time(self, table: Accounts) -> None:
        """Otherwise a client's second address would be owed what all others have had."""
        holder = table.named("holder")
        long = asked(holder, foreseen=100_000.0)
        long.max_tokens = None
        begun(table, long)
        with table.waits(asked(holder)):
            for _ in range(200):
                honest = asked(table.named("honest"), foreseen=100.0)
                with table.waits(honest):
                    begun(table, honest)
                honest._generated = 100
                table.ended(honest, by_itself=True)
            second = asked(table.named("second"))
            with table.waits(second):
                assert second.account.served(None) > 0.9 * table.named("honest").served(None)

    def test_a_weight_of_two_is_served_twice_as_much_for_the_same(self) -> None:
        table = Accounts(AccountOptions(weights={"big": 2.0}))
        request = asked(table.named("big"))
        request.account.settle(request, 100.0)
        assert request.account.served(None) == 50.0


class TestForecasts:
    def test_what_a_clients_were_wrong_by_corrects_its_next(self) -> None:
        account = Account("filler")
        for _ in range(20):
            account.learn(18.0, 526, by_itself=True)
        assert 10 < account.correction < 526 / 18
        assert Account("other").correction == 1.0

    def test_honest_errors_cancel_out(self) -> None:
        account = Account("honest")
        for _ in range(50):
            account.learn(100.0, 200, by_itself=True)
            account.learn(100.0, 50, by_itself=True)
        assert account.correction == pytest.approx(1.0, abs=0.05)

    def test_answers_that_were_cut_say_only_that_they_were_no_shorter(self) -> None:
        account = Account("cut")
        for _ in range(20):
            account.learn(500.0, 1, by_itself=False)
        assert account.correction == 1.0
        account.learn(10.0, 500, by_itself=False)
        assert account.correction > 1.0


def test_a_new_accounts_promises_are_as_strict_as_is_usual(table: Accounts) -> None:
    new = table.named("new")
    assert table.strictness(new, 0.9) == 0.0
    for i, strictness in enumerate((0.1, 0.2, 2.0)):
        table.named(str(i)).strictness[0.9] = strictness
    assert table.strictness(new, 0.9) == 0.2, "no single account changes it"
    assert table.strictness(table.named("2"), 0.9) == 2.0


LONG_TEXT = "a river " * 6_000
LONG_TOKENS = len(LONG_TEXT) // 4
PICTURE = {"url": "data:image/png;base64," + "A" * 40_000}


@pytest.mark.parametrize(
    ("path", "content", "media"),
    [
        ("/v1/chat/completions", "a", 0),
        ("/v1/chat/completions", [{"type": "text", "text": LONG_TEXT}], 0),
        ("/v1/chat/completions", [{"type": "image_url", "image_url": PICTURE}], 40_000),
        ("/v1/chat/completions", [{"type": "text", "text": "a", "image_url": PICTURE}], 0),
        ("/v1/messages", [{"type": "image", "source": PICTURE}], 40_000),
        ("/v1/responses", [{"type": "input_image", "image_url": PICTURE["url"]}], 40_000),
    ],
)
def test_what_of_a_prompt_are_pictures_is_known(path: str, content: Any, media: int) -> None:
    messages = [{"role": "user", "content": content}, {"role": "user", "content": LONG_TEXT}]
    body = json.dumps(_only(path, messages)).encode()
    read = read_request if path == "/v1/chat/completions" else read_forwarded
    client = read(path, body)
    assert media <= client.media < media + 100
    assert client.size - client.media > len(LONG_TEXT)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 64))
def test_text_costs_its_length_and_pictures_a_mean_request_at_most(
    text: int, media: int, answers: int
) -> None:
    table = Accounts(AccountOptions())
    request = live_request("r")
    request.prompt_tokens, request.media_tokens = text + media, media
    request.answers = answers
    most = table.mean_service * answers
    assert table.service(request) == text + min(media, most)
    request.prompt_is_known = True
    assert table.service(request) == text + media


USAGE = {"prompt_tokens": 12_000, "completion_tokens": 700}
STREAMS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]},
        {"choices": [{"index": 1, "text": "a", "finish_reason": "length"}]},
        {"choices": [], "usage": USAGE},
    ],
    "/v1/chat/completions": [
        {"choices": [{"delta": {"content": "a"}}], "usage": {**USAGE, "completion_tokens": 1}},
        {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 12_000}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 700}},
        {"type": "message_stop"},
    ],
    "/v1/responses": [
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.output_text.delta", "delta": "a"},
        {
            "type": "response.completed",
            "response": {"usage": {"input_tokens": 12_000, "output_tokens": 700}},
        },
    ],
}


def streaming(it: Cluster, events: list[dict[str, Any]], ends: bool = True) -> None:
    """Have the engines answer with these events."""

    async def script(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if not ends:
            await asyncio.sleep(60)
        await response.write(b"data: [DONE]\n\n")
        return response

    it.set_decodes(script=script)


def streamed(path: str) -> dict[str, Any]:
    body = {"model": "m", "stream": True, "n": 2, "max_tokens": 1000}
    messages = [{"role": "user", "content": "a"}]
    return body | {"prompt": "a"} | _only(path, messages)


def _only(path: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input": messages} if path == "/v1/responses" else {"messages": messages}


async def served(it: Cluster) -> float:
    account = it.proxy.cluster.accounts.named("127.0.0.1")
    await until(lambda: not account.charges)
    return account.served(frozenset())


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.cluster(decodes=1)
async def test_a_stream_costs_what_its_engine_says_at_its_end(it: Cluster, path: str) -> None:
    streaming(it, STREAMS[path])
    async with it.session.post(it.url + path, json=streamed(path)) as response:
        assert response.status == 200 and await response.read()
    assert await served(it) == 12_000 + 2 * 700


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.cluster(decodes=1)
async def test_who_leaves_a_stream_pays_for_the_prompt_that_it_has_counted(
    it: Cluster, path: str
) -> None:
    streaming(it, STREAMS[path][:1], ends=False)
    async with it.session.post(it.url + path, json=streamed(path)) as response:
        await response.content.readline()
    assert await served(it) > 12_000


@pytest.mark.parametrize("usage", [1, "a", [], {"prompt_tokens": "a"}, {"prompt_tokens": -1}])
@pytest.mark.cluster(decodes=1)
async def test_counts_that_cannot_be_break_no_stream(it: Cluster, usage: Any) -> None:
    streaming(it, [*STREAMS["/v1/completions"][:2], {"choices": [], "usage": usage}])
    url = it.url + "/v1/completions"
    async with it.session.post(url, json=streamed("/v1/completions")) as response:
        answer = await response.read()
    assert answer.endswith(b"[DONE]\n\n") and b"error" not in answer


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}, {"n": 2, "stream": True}])
@pytest.mark.cluster(decodes=1)
async def test_who_leaves_while_a_long_prompt_is_computed_pays_for_it(
    it: Cluster, fields: dict[str, Any]
) -> None:
    began = asyncio.Event()

    async def script(http: web.Request) -> web.StreamResponse:
        del http
        began.set()
        await asyncio.sleep(60)
        raise AssertionError

    it.set_engines(script=script, prefill_script=script)
    body = {"model": "m", "max_tokens": 1, "prompt": LONG_TEXT, **fields}
    asking = asyncio.create_task(it.session.post(it.url + "/v1/completions", json=body))
    await began.wait()
    asking.cancel()
    assert await served(it) > LONG_TOKENS
