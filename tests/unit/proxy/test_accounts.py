"""Accounts: who a client is, what it has had, and what it may have where others wait."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_requests import live_request
from tokenizers import Tokenizer

from rescheduler.engines.deployment import AccountOptions
from rescheduler.placement.account import Account
from rescheduler.placement.accounts import Accounts, service_of
from rescheduler.placement.live_request import LiveRequest

POOL = 12
KEY = {"Authorization": "Bearer mine"}


@pytest.fixture
def table() -> Accounts:
    return Accounts(AccountOptions())


def asked(account: Account, tokenizer: Tokenizer, foreseen: float = 10.0) -> LiveRequest:
    request = live_request("r", tokenizer)
    request.account, request.foreseen_tokens, request.prompt_tokens = account, foreseen, 30
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

    def test_the_table_is_bounded_and_keeps_who_has_requests(
        self, table: Accounts, tokenizer: Tokenizer
    ) -> None:
        busy = table.named("busy")
        table.began(asked(busy, tokenizer))
        for i in range(5000):
            table.named(str(i))
        assert table.named("busy") is busy
        running = set()
        for i in range(3000):
            request = asked(table.named(f"r{i}"), tokenizer)
            table.began(request)
            running.add(request.account)
        assert len(running) < 2000, "the rest share one"
        assert len(table._accounts) <= 1025


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=200))
def test_a_share_of_the_pool_is_anyones_and_twice_the_pool_is_never_passed(
    steps: list[tuple[str, bool]],
) -> None:
    table = Accounts(AccountOptions())
    waiting: list[LiveRequest] = []
    for name, comes in steps:
        account = table.named(name)
        if not comes:
            waiting = waiting[1:]
            continue
        counts = Counter(request.account for request in waiting)
        may = len(waiting) < POOL or table.may_wait(account, POOL, waiting)
        share = POOL // len({account, *counts})
        if counts[account] < share and len(waiting) < 2 * POOL:
            assert may, "below its share"
        if may:
            request = live_request("r", None)
            request.account = account
            waiting.append(request)
        assert len(waiting) <= 2 * POOL


def test_one_that_fills_the_pool_keeps_nobody_out(table: Accounts) -> None:
    flood, waiting = table.named("flood"), []
    for _ in range(POOL):
        request = live_request("r", None)
        request.account = flood
        waiting.append(request)
    assert not table.may_wait(flood, POOL, waiting)
    assert table.may_wait(table.named("other"), POOL, waiting)


class TestService:
    def test_what_runs_is_charged_as_foreseen_and_what_has_ended_as_it_was(
        self, table: Accounts, tokenizer: Tokenizer
    ) -> None:
        request = asked(table.named("a"), tokenizer)
        table.began(request)
        table.placed(request, {request.account})
        assert request.account.served == 30 + 2 * 10
        request._generated = 100
        table.outgrown(request)
        assert request.account.served == 30 + 2 * 100, "it outlives its forecast"
        table.ended(request, by_itself=True)
        assert request.account.served == service_of(request) == 230

    def test_what_an_engine_refused_is_not_charged(
        self, table: Accounts, tokenizer: Tokenizer
    ) -> None:
        request = asked(table.named("a"), tokenizer)
        before = table.mean_service
        table.began(request)
        table.placed(request, {request.account})
        request.refused = True
        table.ended(request, by_itself=False)
        assert request.account.served == 0.0 and table.mean_service == before

    def test_who_comes_late_has_no_claim_to_what_others_had_before(
        self, table: Accounts, tokenizer: Tokenizer
    ) -> None:
        early = asked(table.named("early"), tokenizer)
        early.account.settle(early, 1000.0)
        table.began(early)
        table.placed(early, {early.account})
        late = asked(table.named("late"), tokenizer)
        table.began(late)
        assert late.account.served == 1000.0

    def test_a_weight_of_two_is_served_twice_as_much_for_the_same(
        self, tokenizer: Tokenizer
    ) -> None:
        table = Accounts(AccountOptions(weights={"big": 2.0}))
        request = asked(table.named("big"), tokenizer)
        request.account.settle(request, 100.0)
        assert request.account.served == 50.0


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
