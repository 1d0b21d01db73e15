"""Which rows are due: by a request's own tokens, or for all in every k-th step; and of whom."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_collection.capture.capture_hook import Cadence, CapturedRows, CaptureHook
from data_collection.capture.requests import FinishedRequest, parse_request_id

K = 4


class Listener:
    """Keeps what it is given."""

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        self.rows: list[CapturedRows] = []
        self.ended: list[str] = []

    def on_rows(self, rows: CapturedRows) -> None:
        self.rows.append(rows)

    def on_finished(self, finished: list[FinishedRequest]) -> None:
        self.ended += [request.request_id for request in finished]

    def close(self) -> None:
        pass

    def captured(self) -> list[tuple[int, str, int]]:
        return [
            (rows.step, name, n)
            for rows in self.rows
            for name, n in zip(rows.request_ids, rows.generated_tokens, strict=True)
        ]


def nothing(positions: list[int], behind: list[int]) -> torch.Tensor:
    return torch.zeros(len(positions), 2)


def test_rows_are_due_by_a_requests_tokens_or_for_all_in_every_kth_step() -> None:
    by_request, by_step, generated = Listener("request"), Listener("step"), {}
    hook = CaptureHook(K, [by_request, by_step], generated)
    for i in range(9):  # a begins in the first step, b in the third
        for name, prompt, n in (("a", 7, i), ("b", 3, i - 2)):
            if n == 0:
                hook.request_added(name, prompt, max_tokens=50)
                hook.request_scheduled(name, 0, prompt, 0)
            elif n > 0:
                hook.request_scheduled(name, prompt + n - 1, 1, n)
        hook.step_done(["a", "b"] if i >= 2 else ["a"], nothing, [])
    ends = [(1, "a", 0), (3, "b", 0)]
    assert by_request.captured() == [*ends, (5, "a", 4), (7, "b", 4), (9, "a", 8)]
    every = [(4, "a", 3), (4, "b", 1), (8, "a", 7), (8, "b", 5)]
    assert by_step.captured() == [*ends, *every]
    assert by_step.rows[0].max_tokens == [50]
    assert generated == {"a": 8, "b": 6}
    hook.step_done([], nothing, [FinishedRequest("a", "stop", 7, 9, 50, None, [], {})])
    assert by_request.ended == ["a"] and generated == {"b": 6}


def test_parts_of_a_chunked_prefill_and_of_a_recomputation_are_not_rows() -> None:
    by_step, generated = Listener("step"), {}
    hook = CaptureHook(1, [by_step], generated)
    hook.request_added("a", 10, max_tokens=50)
    hook.request_scheduled("a", 0, 6, 0)  # the first part of the prompt
    hook.step_done(["a"], nothing, [])
    assert by_step.captured() == [] and generated == {}
    hook.request_scheduled("a", 6, 4, 0)
    hook.step_done(["a"], nothing, [])
    hook.request_scheduled("a", 0, 12, 5)  # preempted at n = 5, recomputed in parts
    hook.step_done(["a"], nothing, [])
    assert by_step.captured() == [(2, "a", 0)]


@given(
    k=st.integers(1, 9),
    prompt=st.integers(1, 30),
    answer=st.integers(1, 60),
    chunks=st.lists(st.integers(1, 25), min_size=1),
)
def test_a_replay_gives_every_row_of_the_live_run_once(
    k: int, prompt: int, answer: int, chunks: list[int]
) -> None:
    by_request, generated = Listener("request"), {}
    hook = CaptureHook(k, [by_request], generated)
    hook.request_added("other", 5, max_tokens=9)
    hook.request_added("a", prompt, max_tokens=50, is_replay=True)
    computed, known = 0, prompt + answer - 1
    while computed < known:
        chunk = min(chunks[computed % len(chunks)], known - computed)
        last = computed + chunk - 1

        def positions(batch: list[int], behind: list[int], last: int = last) -> torch.Tensor:
            assert set(batch) == {1}
            return torch.tensor([[float(last - back)] for back in behind])

        hook.request_scheduled("a", computed, chunk, 0)
        hook.step_done(["other", "a"], positions, [])
        computed += chunk
    assert [n for _, _, n in by_request.captured()] == list(range(0, answer, k))
    found = [int(row) for rows in by_request.rows for row in rows.hidden_states[:, 0]]
    assert found == [prompt + n - 1 for n in range(0, answer, k)], "token p + n, from 1"
    assert generated == {}, "a replay generates nothing that a forecast could be of"


tails = st.text("abcdefghijklmnopqrstuvwxyzABCDEF0123456789-_.", min_size=1, max_size=40)
suffixes = st.text("0123456789abcdef", min_size=8, max_size=8)
counts = st.integers(0, 10_000)


@given(st.sampled_from(["chatcmpl-", "prompt-", "req_"]), tails, st.none() | counts, suffixes)
def test_the_suffix_is_removed_once_and_children_are_samples(
    kind: str, tail: str, sample: int | None, suffix: str
) -> None:
    child = "" if sample is None else f"{sample}_"
    assert parse_request_id(f"{child}{kind}{tail}-{suffix}") == (kind + tail, 0, sample or 0)


@given(tails, counts, counts, suffixes)
def test_completions_number_their_prompts(tail: str, prompt: int, sample: int, suffix: str) -> None:
    internal = f"{sample}_cmpl-{tail}-{prompt}-{suffix}"
    assert parse_request_id(internal) == (f"cmpl-{tail}", prompt, sample)


def test_an_empty_id_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be empty"):
        parse_request_id("")
