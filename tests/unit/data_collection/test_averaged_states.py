"""States averaged over a request's tokens: what the formula says, however the tokens come."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_collection.capture.averaged_states import AveragedStates
from data_collection.capture.capture_hook import CapturedRows, CaptureHook
from data_collection.capture.requests import FinishedRequest

D = 3


def states_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed))


def expected(states: torch.Tensor, half_life: float) -> torch.Tensor:
    """Return the average at every token, by its formula in float64."""
    ages = np.arange(len(states))
    shares = np.where(ages[:, None] >= ages, 0.5 ** ((ages[:, None] - ages) / half_life), 0.0)
    averages = shares @ states.double().numpy() / shares.sum(axis=1, keepdims=True)
    return torch.from_numpy(averages).float()


def averages(half_life: float = 10.0, requests: int = 4) -> AveragedStates:
    return AveragedStates(half_life, D, torch.device("cpu"), requests)


@given(half_life=st.floats(0.5, 500), n=st.integers(1, 60))
def test_tokens_that_come_one_by_one_are_averaged_as_the_formula_says(
    half_life: float, n: int
) -> None:
    kept, states = averages(half_life), states_of(n)
    found = []
    for state in states:
        kept.add(["a"], state[None])
        found.append(kept.read(["a"])[0])
    torch.testing.assert_close(torch.stack(found), expected(states, half_life))


@given(half_life=st.floats(0.5, 500), parts=st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_a_replay_in_parts_has_the_averages_of_tokens_that_come_one_by_one(
    half_life: float, parts: list[int]
) -> None:
    kept, states = averages(half_life), states_of(sum(parts))
    found = torch.cat([kept.extend("a", part) for part in torch.split(states, parts)])
    torch.testing.assert_close(found, expected(states, half_life), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(kept.read(["a"])[0], found[-1])


def test_more_requests_than_expected_each_keep_their_own_average() -> None:
    kept, names = averages(requests=2), [f"request-{i}" for i in range(11)]
    states = states_of(11)
    kept.add(names[:5], states[:5])
    kept.add(names, states)
    torch.testing.assert_close(kept.read(names), states)


def test_a_request_in_the_place_of_another_that_ended_knows_nothing_of_it() -> None:
    kept = averages(requests=1)
    kept.add(["a"], torch.full((1, D), float("inf")))
    kept.forget(["a", "unknown"])
    kept.add(["b"], torch.ones(1, D))
    assert kept.read(["b"]).tolist() == [[1.0] * D]
    kept.forget(["b"])
    assert kept.extend("c", torch.ones(2, D)).tolist() == [[1.0] * D] * 2


class Listener:
    cadence = "request"

    def __init__(self) -> None:
        self.rows: list[CapturedRows] = []

    def on_rows(self, rows: CapturedRows) -> None:
        self.rows.append(rows)

    def on_finished(self, finished: list[FinishedRequest]) -> None:
        pass

    def close(self) -> None:
        pass

    def vectors(self, name: str) -> dict[int, torch.Tensor]:
        return {
            n: rows.hidden_states[i]
            for rows in self.rows
            for i, (other, n) in enumerate(
                zip(rows.request_ids, rows.generated_tokens, strict=True)
            )
            if other == name
        }


class Engine:
    """Steps of requests whose states of token t of the answer are known."""

    def __init__(self, k: int, half_life: float) -> None:
        self.listener = Listener()
        self.kept = averages(half_life)
        self.hook = CaptureHook(k, [self.listener], averages=self.kept)
        self.states = {name: states_of(200, i) for i, name in enumerate("ab")}

    def step(self, last: dict[str, int]) -> None:
        """Run a step that ends at so many generated tokens of each."""
        names = list(last)

        def gather(positions: list[int], behind: list[int]) -> torch.Tensor:
            return torch.stack(
                [
                    self.states[names[i]][last[names[i]] - back]
                    for i, back in zip(positions, behind, strict=True)
                ]
            )

        self.hook.step_done(names, gather, [])


@pytest.mark.parametrize("k", [1, 7])
def test_rows_are_averages_of_all_tokens_also_of_those_between_two_rows(k: int) -> None:
    engine = Engine(k, half_life=5.0)
    engine.hook.request_added("a", 10, max_tokens=100)
    engine.hook.request_added("b", 4, max_tokens=100)
    for n in range(30):
        engine.hook.request_scheduled("a", *((0, 10, 0) if n == 0 else (9 + n, 1, n)))
        engine.hook.request_scheduled("b", *((0, 4, 0) if n == 0 else (3 + n, 1, n)))
        engine.step({"a": n, "b": n})
    for name in "ab":
        found = engine.listener.vectors(name)
        assert list(found) == list(range(0, 30, k))
        wanted = expected(engine.states[name][:30], 5.0)
        torch.testing.assert_close(torch.stack([*found.values()]), wanted[::k])


def test_a_preempted_request_goes_on_with_its_average() -> None:
    engine = Engine(1, half_life=5.0)
    engine.hook.request_added("a", 10, max_tokens=100)
    for n in range(8):
        engine.hook.request_scheduled("a", *((0, 10, 0) if n == 0 else (9 + n, 1, n)))
        engine.step({"a": n})
    engine.hook.request_scheduled("a", 0, 9, 8)  # computed anew, in two parts
    engine.step({"a": 0})
    engine.hook.request_scheduled("a", 9, 9, 8)
    engine.step({"a": 8})
    found = engine.listener.vectors("a")
    torch.testing.assert_close(found[8], expected(engine.states["a"][:9], 5.0)[8])


def test_a_replay_has_the_rows_of_the_answer_as_it_was_generated() -> None:
    engine, tokens = Engine(7, half_life=5.0), 50
    engine.hook.request_added("a", 10, max_tokens=100, is_replay=True)
    engine.hook.request_scheduled("a", 0, 8, 0)  # a part of the prompt
    engine.step({"a": -2})
    engine.hook.request_scheduled("a", 8, 22, 0)  # the rest of it, and of the answer 20 tokens
    engine.step({"a": 20})
    engine.hook.request_scheduled("a", 30, tokens - 20, 0)
    engine.step({"a": tokens})
    found = engine.listener.vectors("a")
    assert list(found) == list(range(0, tokens + 1, 7))
    wanted = expected(engine.states["a"][: tokens + 1], 5.0)[::7]
    torch.testing.assert_close(torch.stack([*found.values()]), wanted, atol=1e-5, rtol=1e-4)


def test_a_request_that_has_ended_is_forgotten() -> None:
    engine = Engine(1, half_life=5.0)
    engine.hook.request_added("a", 10, max_tokens=100)
    engine.hook.request_scheduled("a", 0, 10, 0)
    engine.step({"a": 0})
    ended = FinishedRequest("a", "stop", 10, 1, 100, None, [], {})
    engine.hook.step_done([], lambda positions, behind: torch.zeros(0, D), [ended])
    engine.hook.request_added("a", 10, max_tokens=100)
    engine.hook.request_scheduled("a", 10, 1, 1)
    engine.step({"a": 5})
    assert torch.equal(engine.listener.rows[-1].hidden_states[0], engine.states["a"][5])


def test_a_replay_that_is_computed_anew_begins_anew() -> None:
    engine = Engine(1, half_life=5.0)
    engine.hook.request_added("a", 10, max_tokens=100, is_replay=True)
    for _ in range(2):  # preempted in between
        engine.hook.request_scheduled("a", 0, 10 + 20, 0)
        engine.step({"a": 20})
    wanted = expected(engine.states["a"][:21], 5.0)
    for rows in engine.listener.rows:
        torch.testing.assert_close(rows.hidden_states, wanted)


def test_a_token_that_is_computed_twice_counts_once() -> None:
    engine = Engine(1, half_life=5.0)
    engine.hook.request_added("a", 10, max_tokens=100)
    engine.hook.request_scheduled("a", 0, 10, 0)
    engine.step({"a": 0})
    for n in (1, 2, 2, 3):  # what the second step sampled was dropped
        engine.hook.request_scheduled("a", *((9 + n, 1, n) if n != 2 else (0, 12, 2)))
        engine.step({"a": n})
    found = engine.listener.vectors("a")
    torch.testing.assert_close(found[3], expected(engine.states["a"][:4], 5.0)[3])
