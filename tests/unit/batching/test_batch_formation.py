"""Batches and budgets worked out by hand, what FairBatching promises, and its plain form."""

from collections.abc import Sequence
from math import floor, inf

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from reference_batches import Formation, Held, Waiting, groups, plain_batch, time_budget

from rescheduler.batching.batch_formation import FORMATIONS, BatchRules, form_batch, prefill_budget

FAIR_NAMES = ("fairbatching", "fairbatching_tokens", "fairbatching_fixed")


def batch(rules: Formation, requests: Sequence[Waiting]) -> tuple[list[int], float]:
    """Return the tokens that `form_batch` takes of each request, and its estimate."""
    numbers = rules._asdict()
    numbers["formation"] = FORMATIONS[numbers.pop("name")]
    made = BatchRules(
        numbers["formation"], rules.a, rules.b, rules.c, rules.max_tokens, rules.token_budget
    )
    n = len(requests)
    tokens = np.full(n, -1, dtype=np.int64)
    seconds = form_batch(
        made,
        np.array([one.slack for one in requests], dtype=np.float64),
        np.array([one.tpot for one in requests], dtype=np.float64),
        np.array([one.decoding for one in requests], dtype=np.bool_),
        np.array([one.wanted for one in requests], dtype=np.int64),
        np.array([one.context for one in requests], dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        tokens,
    )
    return tokens.tolist(), seconds


def decode(slack: float, context: int = 0, tpot: float = 4.0) -> Waiting:
    return Waiting(slack, tpot, True, 1, context)


def prefill(slack: float, wanted: int, context: int | None = None, tpot: float = 4.0) -> Waiting:
    return Waiting(slack, tpot, False, wanted, wanted if context is None else context)


# A batch takes 1 s, a token 0.125 s, a context token 1/64 s; TPOT objectives are 4 s.
FAIR = Formation("fairbatching", 1.0, 0.125, 1 / 64, 1000, 8)
TOKENS = FAIR._replace(name="fairbatching_tokens")


# The paper's three cases (§3.3)


def test_with_sufficient_capacity_everything_is_taken() -> None:
    # B = 10: 9 s for 2 decodes of 0.125 + 1, and 20 tokens of 0.125 + 20/64 in all.
    requests = [decode(10.0, 64), prefill(5.0, 20), decode(12.0, 64)]
    assert batch(FAIR, requests) == ([1, 20, 1], 1 + 2.25 + 2.5 + 0.3125)


def test_with_moderate_capacity_decodes_that_can_wait_do() -> None:
    # B = 6, urgent below 10. 5 s: the urgent decode 1.125; the prompt 24 · 0.125 + 24/64 = 3.375;
    # of 0.5 s left the decode due at 11 takes 0.125 + 16/64, the one due at 12 no longer fits.
    requests = [decode(12.0, 64), prefill(5.0, 24), decode(11.0, 16), decode(6.0, 64)]
    tokens, seconds = batch(FAIR, requests)
    assert tokens == [0, 24, 1, 1]
    assert seconds == 1 + 1.125 + 3.375 + 0.375


def test_urgent_decodes_come_first_when_capacity_is_constrained() -> None:
    # B = 4, the TPOT: 3 s for two urgent decodes of 1.125. Of 0.75 s the prompt's context takes
    # 32/64, and two of its tokens fit the rest.
    requests = [prefill(1.0, 32), decode(3.0, 64), decode(7.0, 64), decode(8.5, 0)]
    tokens, seconds = batch(FAIR, requests)
    assert tokens == [2, 1, 1, 0]
    assert seconds == 4.0


def test_urgent_decodes_are_taken_though_they_exceed_the_budget() -> None:
    requests = [decode(1.0, 128), prefill(-2.0, 8), decode(2.0, 128), decode(-5.0, 128)]
    assert batch(FAIR, requests) == ([1, 0, 1, 1], 1 + 3 * 2.125)


def test_nothing_takes_no_time() -> None:
    assert batch(FAIR, []) == ([], 0.0)


# Whatever the requests


@st.composite
def cases(
    draw: st.DrawFn, names: Sequence[str] = tuple(FORMATIONS)
) -> tuple[Formation, list[Waiting]]:
    """Requests with slacks of their own; no sum of their numbers is rounded."""
    rules = Formation(
        draw(st.sampled_from(names)),
        draw(st.sampled_from([0.0, 0.5, 1.0])),
        draw(st.sampled_from([0.0, 0.125, 0.25])),
        draw(st.sampled_from([0.0, 1 / 64, 1 / 8])),
        draw(st.integers(1, 64)),
        draw(st.integers(1, 40)),
    )
    slacks = draw(st.lists(st.integers(-40, 80), min_size=1, max_size=9, unique=True))
    requests = []
    for slack in slacks:
        context = draw(st.integers(1, 100))
        tpot = draw(st.sampled_from([0.5, 1.0, 4.0]))
        if draw(st.booleans()):
            requests.append(Waiting(slack / 4, tpot, True, 1, context))
        else:
            requests.append(Waiting(slack / 4, tpot, False, draw(st.integers(1, context)), context))
    return rules, requests


Case = tuple[Formation, list[Waiting]]


def takes(rules: Formation, requests: Sequence[Waiting], tokens: Sequence[int]) -> float:
    """Return the linear model's seconds of a batch."""
    taken = [(n, one) for n, one in zip(tokens, requests, strict=True) if n > 0]
    seconds = sum(rules.b * n + rules.c * one.context for n, one in taken)
    return rules.a + seconds if taken else 0.0


@given(cases())
@example((FAIR, [decode(9.0), prefill(-5.0, 100), decode(1.0, tpot=2.0)]))
# The second chunk does not pay for the first one's context (line 45 as printed adds it).
@example((FAIR, [decode(4.0), prefill(1.0, 8, 64), prefill(2.0, 24, 24)]))
# A late prompt without room gets the tokens left, though one behind it would fit; in time, not.
@example((FAIR, [decode(4.0, 128), prefill(-1.0, 200, 256), prefill(2.0, 2)]))
@example((FAIR, [decode(4.0, 128), prefill(0.5, 200, 256), prefill(2.0, 2)]))
# A budget below one token still has urgent decodes.
@example((TOKENS, [decode(0.5, tpot=0.5), decode(0.75, tpot=0.5), prefill(1.0, 4, tpot=0.5)]))
def test_the_plain_form_takes_the_same(case: Case) -> None:
    tokens, seconds = batch(*case)
    assert tokens == plain_batch(*case)
    assert seconds == takes(*case, tokens)


@given(cases())
def test_no_more_tokens_than_there_are_or_than_a_batch_holds(case: Case) -> None:
    rules, requests = case
    tokens, _ = batch(*case)
    assert all(0 <= n <= one.wanted for n, one in zip(tokens, requests, strict=True))
    assert sum(tokens) <= rules.max_tokens
    assert any(tokens), "an engine with requests never stands still"


@given(cases(["fairbatching"]))
def test_the_estimate_keeps_to_the_budget_or_to_what_urgent_decodes_take(case: Case) -> None:
    rules, requests = case
    tokens, seconds = batch(*case)
    urgent, prefills, _ = groups(*case)
    alone = takes(rules, [requests[i] for i in urgent], [tokens[i] for i in urgent])
    late = [i for i in prefills[:1] if requests[i].slack < 0]
    beyond = max((rules.c * requests[i].context for i in late), default=0.0)
    assert seconds <= max(time_budget(*case), alone) + beyond
    if not late:
        assert seconds <= max(time_budget(*case), alone)


@given(cases(FAIR_NAMES))
def test_urgent_decodes_are_always_taken_first(case: Case) -> None:
    tokens, _ = batch(*case)
    urgent = groups(*case)[0]
    room = min(case[0].max_tokens, len(urgent))
    assert [tokens[i] for i in urgent] == [1] * room + [0] * (len(urgent) - room)


@given(cases(FAIR_NAMES), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(case: Case, random: object) -> None:
    rules, requests = case
    order = list(range(len(requests)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tokens, _ = batch(rules, requests)
    shuffled, _ = batch(rules, [requests[i] for i in order])
    assert shuffled == [tokens[i] for i in order]


# Nobody starves


class Served:
    """A request as an engine keeps it: what it has computed, and when its next token is due."""

    def __init__(self, arrival: float, prompt: int, output: int) -> None:
        self.arrival = arrival
        self.prompt = prompt
        self.output = output
        self.computed = self.given = 0

    def waiting(self, now: float, ttft: float = 8.0, tpot: float = 4.0) -> Waiting:
        slack = self.arrival + ttft + self.given * tpot - now
        context = self.prompt + self.given
        if self.computed < self.prompt:
            return Waiting(slack, tpot, False, self.prompt - self.computed, context)
        return Waiting(slack, tpot, True, 1, context)

    def compute(self, tokens: int) -> None:
        decoding = self.computed == self.prompt
        self.computed = min(self.computed + tokens, self.prompt)
        self.given += tokens > 0 and (decoding or self.computed == self.prompt)


@given(
    st.sampled_from(sorted(FORMATIONS)),
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 300), st.integers(1, 6)),
        min_size=1,
        max_size=8,
    ),
    st.integers(8, 64),
)
def test_every_request_ends(name: str, trace: list[tuple[int, int, int]], most: int) -> None:
    rules = FAIR._replace(name=name, max_tokens=most, token_budget=min(most, 16))
    there = [Served(arrival / 4, prompt, output) for arrival, prompt, output in trace]
    now, steps = 0.0, 0
    while there:
        present = [one for one in there if one.arrival <= now]
        if not present:
            now = min(one.arrival for one in there)
            continue
        tokens, seconds = batch(rules, [one.waiting(now) for one in present])
        assert seconds > 0
        now += seconds
        for one, n in zip(present, tokens, strict=True):
            one.compute(n)
        there = [one for one in there if one.given < one.output]
        steps += 1
        assert steps < 20_000


@pytest.mark.parametrize("name", FAIR_NAMES)
@pytest.mark.parametrize("length", [150, 400])
def test_a_long_prompt_is_computed_among_short_ones_without_end(name: str, length: int) -> None:
    """Short prompts keep coming, and their decodes keep the batches full."""
    rules = FAIR._replace(name=name, token_budget=8)
    long = Served(0.0, length, 1)
    there, now, coming = [long], 0.0, 0.0
    for _ in range(3_000):
        while coming <= now:
            there.append(Served(coming, 8, 12))
            coming += 3.0
        tokens, seconds = batch(rules, [one.waiting(now) for one in there])
        now += seconds
        for one, n in zip(there, tokens, strict=True):
            one.compute(n)
        there = [one for one in there if one.given < one.output]
        if long.given:
            return
    raise AssertionError(f"{long.computed} of {length} tokens after {now:.0f} s")


def test_an_infinite_budget_is_not_a_number_of_tokens() -> None:
    rules = TOKENS._replace(b=0.0, c=0.0)
    assert batch(rules, [decode(5.0), prefill(1.0, 40)])[0] == [1, 40]
    assert batch(rules, [decode(5.0, tpot=inf), prefill(1.0, 40, tpot=inf)])[0] == [1, 40]


def budget(
    a: float, b: float, c: float, ttft: float, tpot: float, held: Sequence[Held], whole: bool
) -> float:
    return prefill_budget(
        BatchRules(FORMATIONS["fairbatching"], a, b, c, 8192, 8192),
        ttft,
        tpot,
        np.array([one.slack for one in held], dtype=np.float64),
        np.array([one.context for one in held], dtype=np.int64),
        np.array([one.prompt_left for one in held], dtype=np.int64),
        whole,
    )


def test_the_formula_as_printed() -> None:
    # T = 2, TPOT = 0.5, a = 0.125, b = 0.0625, c = 1/1024. N_i = (2 − 0.75)/0.5 = 2.5 and 1; N =
    # 3.5, 0.4375 s; 2.5 · (0.0625 + 256/1024) = 0.78125; 1 · (0.0625 + 0.125) = 0.1875; of the
    # prefill, due in 1.5 s, 1 · (0.0625 + 0.0625). What is left is for prompts, less its 40.
    held = [Held(0.75, 256, 0), Held(1.5, 128, 0), Held(1.5, 64, 40)]
    left = 2 - 0.4375 - 0.78125 - 0.1875 - 0.125
    expected = left / (0.0625 + 1 / 1024) - 40
    assert budget(0.125, 0.0625, 1 / 1024, 2.0, 0.5, held, False) == pytest.approx(expected)


def test_an_idle_engine_has_one_batch_of_prompts() -> None:
    for whole in (False, True):
        assert budget(0.5, 0.25, 0.25, 2.0, 0.5, [], whole) == 3.0
    assert budget(3.0, 0.25, 0.25, 2.0, 0.5, [], False) == -2.0
    assert budget(3.0, 0.25, 0.25, 2.0, 0.5, [], True) == 0.0, "no batch ends in time"


@pytest.mark.parametrize("whole", [False, True])
def test_a_request_far_ahead_neither_takes_nor_gives(whole: bool) -> None:
    far = budget(0.5, 0.25, 0.0, 2.0, 0.5, [Held(9.0, 100, 0)], whole)
    assert far == budget(0.5, 0.25, 0.0, 2.0, 0.5, [], whole)


@pytest.mark.parametrize("whole", [False, True])
def test_prompts_that_cost_nothing_are_without_limit(whole: bool) -> None:
    assert budget(0.5, 0.0, 0.0, 2.0, 0.5, [], whole) == inf
    assert budget(0.5, 0.0, 0.0, 2.0, 0.5, [Held(-9.0, 10, 0)], whole) == -inf


# Batches laid out one by one


def laid_out(
    a: float, b: float, c: float, ttft: float, tpot: float, held: Sequence[Held]
) -> tuple[int, int] | None:
    """Return prompt tokens computed within a TTFT by batches laid out in time, and how many.

    Decodes are put off until their slack is used up (the paper's worst case): a batch ends
    whenever a token is due, and has the tokens that are due before the next one can end, a TPOT
    later. The time that its decodes leave computes whole prompt tokens, those of prompts begun
    first. None if something is late.
    """
    due = [one.slack for one in held]
    left = [one.prompt_left for one in held]
    now, new, batches = 0.0, 0, 0
    while any(time <= ttft for time in due):
        end = min(due)
        taken = [i for i, time in enumerate(due) if time <= ttft and time < end + tpot]
        decodes = [i for i in taken if held[i].prompt_left == 0 or due[i] > held[i].slack]
        spare = end - now - a - sum(b + c * held[i].context for i in decodes)
        if spare < 0:
            return None
        prompts = floor(spare / (b + c))
        for i in sorted(range(len(held)), key=lambda i: held[i].slack):
            computed = min(left[i], prompts)
            left[i] -= computed
            prompts -= computed
        if any(left[i] for i in taken):
            return None
        new += prompts
        now = end
        batches += 1
        for i in taken:
            due[i] += tpot
    spare = max(ttft - now - a, 0.0)
    return new + floor(spare / (b + c)) - sum(left), batches + 1


@st.composite
def held_requests(draw: st.DrawFn, most: int = 6) -> list[Held]:
    held = []
    for _ in range(draw(st.integers(0, most))):
        prompt = draw(st.sampled_from([0, 0, draw(st.integers(1, 60))]))
        context = max(prompt, draw(st.integers(1, 200)))
        held.append(Held(draw(st.integers(0, 80)) / 32, context, prompt))
    return held


@given(held_requests())
def test_as_many_prompt_tokens_as_batches_laid_out_one_by_one(held: list[Held]) -> None:
    """Every batch laid out loses less than a token to rounding; nothing else differs.

    Both leave out that contexts grow, and that a chunk reads its prompt's context again.
    """
    a, b, c, ttft, tpot = 1 / 32, 1 / 256, 1 / 16384, 2.0, 0.5
    counted = laid_out(a, b, c, ttft, tpot, held)
    assume(counted is not None)
    assert counted is not None
    tokens, batches = counted
    said = budget(a, b, c, ttft, tpot, held, True)
    assert tokens - 1e-6 <= said < tokens + batches


# Bounds


@given(held_requests(), held_requests(1), st.booleans())
def test_more_requests_leave_less(held: list[Held], more: list[Held], whole: bool) -> None:
    one = budget(1 / 32, 1 / 256, 1 / 16384, 2.0, 0.5, held, whole)
    both = budget(1 / 32, 1 / 256, 1 / 16384, 2.0, 0.5, held + more, whole)
    assert both <= one + 1e-9


@given(held_requests(), st.booleans(), st.floats(0.0, 1.0))
def test_slack_leaves_more(held: list[Held], whole: bool, more: float) -> None:
    later = [one._replace(slack=one.slack + more) for one in held]
    now = budget(1 / 32, 1 / 256, 1 / 16384, 2.0, 0.5, held, whole)
    # Up to a batch: a last token later in the window can leave less than one after it.
    spare = (1 / 32) / (1 / 256 + 1 / 16384) if whole else 0.0
    assert budget(1 / 32, 1 / 256, 1 / 16384, 2.0, 0.5, later, whole) >= now - spare - 1e-9
