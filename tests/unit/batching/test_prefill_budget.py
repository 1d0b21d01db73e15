"""The prefill admission budget: by hand, against batches laid out one by one, and its bounds."""

from collections.abc import Sequence
from math import floor, inf

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference_batches import Held

from rescheduler.batching.batch_formation import FAIR, BatchRules, prefill_budget


def budget(
    a: float, b: float, c: float, ttft: float, tpot: float, held: Sequence[Held], whole: bool
) -> float:
    return prefill_budget(
        BatchRules(FAIR, a, b, c, 8192, 8192),
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
