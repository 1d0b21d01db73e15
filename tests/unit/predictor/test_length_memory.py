"""What is forecast from earlier lengths: laws, shares between clients, bounds and files."""

import stat
from math import exp, log
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.past.length_memory import (
    MOST_CHAIN,
    MOST_CLIENTS,
    WAYS,
    KeyArray,
    LengthMemory,
    PastError,
    Recalled,
)
from predictor.past.log_normal import LONGEST, LogNormal

MODEL, ALICE, BOB = 1, 11, 12
laws = st.builds(LogNormal, st.floats(0.0, 12.0), st.floats(0.05, 3.0))


def chain(*names: int) -> KeyArray:
    return np.array(names, dtype=np.uint64)


def teach(
    memory: LengthMemory,
    tokens: int,
    times: int = 1,
    client: int = ALICE,
    keys: KeyArray | None = None,
    cut: bool = False,
) -> None:
    for _ in range(times):
        recalled = memory.recall(MODEL, client, chain() if keys is None else keys)
        memory.learn(recalled, tokens, cut)


def recall(memory: LengthMemory, client: int = ALICE, *names: int) -> Recalled:
    return memory.recall(MODEL, client, chain(*names))


# A length


@given(laws, st.integers(1, 10_000))
def test_an_expected_length_is_the_sum_of_its_survival(law: LogNormal, most: int) -> None:
    edges = np.append(0.0, np.geomspace(0.3, most, 2_001))
    heights = np.array([law.above(float(edge)) for edge in edges])
    area = float(((heights[1:] + heights[:-1]) / 2 * np.diff(edges)).sum())
    assert law.expected(most) == pytest.approx(max(area, 1.0), rel=0.01, abs=0.3)


@given(laws, st.floats(1.0, 1e6))
def test_a_cut_length_is_expected_beyond_its_cut(law: LogNormal, cut: float) -> None:
    mean, error = law.beyond(cut)
    assert mean >= max(log(cut), law.mean) - 1e-6
    assert error >= 0.0


def test_what_lies_beyond_a_cut_is_what_draws_say() -> None:
    law = LogNormal(5.0, 0.8)
    drawn = np.random.default_rng(0).normal(5.0, 0.8, 400_000)
    beyond = drawn[drawn > log(200)]
    mean, error = law.beyond(200)
    assert mean == pytest.approx(beyond.mean(), abs=0.01)
    assert error == pytest.approx(((beyond - 5.0) ** 2).mean(), abs=0.02)


# What is learnt


def test_the_next_request_is_forecast_as_those_of_its_prefix_were() -> None:
    memory = LengthMemory(1024)
    for _ in range(20):
        teach(memory, 2000, keys=chain(1, 2))
        teach(memory, 20, keys=chain(1, 3))
    assert recall(memory, ALICE, 1, 2, 9).length.expected() > 1000
    assert recall(memory, ALICE, 1, 3).length.expected() < 60
    assert recall(memory, ALICE, 1, 2).known == 2
    assert recall(memory, ALICE, 7).known == 0


def test_requests_that_are_new_below_a_prefix_are_told_from_those_that_go_on() -> None:
    memory = LengthMemory(1 << 16)
    for conversation in range(100, 140):
        teach(memory, 800, keys=chain(1, conversation))
        teach(memory, 20, keys=chain(1, conversation, conversation + 1000))
    assert recall(memory, ALICE, 1, 5).length.expected() > 400


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=60))
def test_an_estimate_stays_between_what_was_learnt_and_what_was_assumed(
    lengths: list[tuple[int, bool]],
) -> None:
    memory = LengthMemory(256)
    for tokens, deep in lengths:
        teach(memory, tokens, keys=chain(1, 2) if deep else chain(1))
    logs = [log(tokens) for tokens, _ in lengths] + [log(256.0)]
    assert min(logs) - 1e-4 <= recall(memory, ALICE, 1, 2).length.mean <= max(logs) + 1e-4


@pytest.mark.parametrize("spread", [0.2, 0.9])
def test_the_spread_is_that_of_the_errors(spread: float) -> None:
    memory, generator = LengthMemory(1 << 16), np.random.default_rng(3)
    inside = []
    for i in range(1500):
        keys = chain(1, 2, *range(1000 * i + 10, 1000 * i + 30))
        recalled = memory.recall(MODEL, ALICE, keys)
        tokens = max(1, round(exp(generator.normal(6.0, spread))))
        if i > 100:
            error = log(tokens) - recalled.length.mean
            inside.append(abs(error) < 1.2816 * recalled.length.spread)
        memory.learn(recalled, tokens)
    assert 0.72 < np.mean(inside) < 0.88


def test_one_request_under_many_keys_is_not_taken_for_certain() -> None:
    memory = LengthMemory(1 << 12)
    keys = chain(*range(1, 40))
    teach(memory, 256, keys=keys)
    assert memory.recall(MODEL, ALICE, keys).length.spread > 0.5


def test_answers_that_are_cut_teach_that_they_are_longer() -> None:
    cut, ended = LengthMemory(256), LengthMemory(256)
    teach(cut, 500, 30, cut=True)
    teach(ended, 500, 30)
    assert recall(cut).length.mean > recall(ended).length.mean + 0.3
    assert recall(cut).length.expected() < LONGEST / 100


def test_an_answer_that_is_cut_at_once_teaches_nothing() -> None:
    memory = LengthMemory(256)
    teach(memory, 300, 40)
    before = recall(memory).length.mean
    teach(memory, 1, 200, cut=True)
    assert recall(memory).length.mean == pytest.approx(before, abs=0.1)


def test_a_long_chain_is_known_by_its_beginning_and_its_end() -> None:
    memory = LengthMemory(1 << 12)
    keys = np.arange(1, 1001, dtype=np.uint64)
    teach(memory, 50, keys=keys)
    assert memory.known == MOST_CHAIN + 1
    assert memory.recall(MODEL, ALICE, keys).known == MOST_CHAIN
    assert memory.recall(MODEL, ALICE, keys[:10]).known == 10


# Who lies


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, LONGEST)), max_size=80))
def test_nobody_s_keys_are_below_another_client(lies: list[tuple[int, int]]) -> None:
    memory = LengthMemory(1 << 12)
    teach(memory, 100, 10, ALICE, chain(1, 2))
    for key, tokens in lies:
        teach(memory, tokens, 1, BOB, chain(1, key))
    new = recall(memory, 99, 1, 2)
    assert new.known == 0
    assert new.requests == 0
    assert recall(memory, ALICE, 1, 2).known == 2


def test_a_liar_moves_others_by_one_share_however_much_it_sends() -> None:
    def forecast(lies: int, client: int) -> float:
        memory = LengthMemory(1 << 12)
        for honest in range(20):
            teach(memory, 100, 10, 100 + honest, chain(1))
        teach(memory, LONGEST, lies, BOB, chain(1))
        return recall(memory, client, 1).length.mean

    share = log(LONGEST) / 20
    for client in (7, 100):  # one that is new, and one that is known
        truth, few, many = (forecast(lies, client) for lies in (0, 200, 2000))
        assert 0 <= few - truth < share
        assert many == pytest.approx(few, abs=0.01)
    known = forecast(2000, 100) - forecast(0, 100)
    assert known < 0.05


def test_a_flood_of_keys_takes_no_entry_of_a_client_with_fewer() -> None:
    memory = LengthMemory(1 << 10)
    generator = np.random.default_rng(1)
    kept = generator.integers(1, 1 << 62, 20).astype(np.uint64)
    for key in kept:
        teach(memory, 1000, 3, ALICE, chain(key))
    for _ in range(300):
        teach(memory, 1, 1, BOB, generator.integers(1, 1 << 62, 50).astype(np.uint64))
    assert memory.known == 1 << 10
    assert all(recall(memory, ALICE, int(key)).known == 1 for key in kept)


def test_decoys_under_a_client_s_own_prefix_are_its_own() -> None:
    memory = LengthMemory(1 << 12)
    teach(memory, 1000, 20, ALICE, chain(1, 2))
    before = recall(memory, ALICE, 1, 2).length
    for decoy in range(500):
        teach(memory, 1, 1, BOB, chain(1, 2, decoy))
    after = recall(memory, ALICE, 1, 2).length
    assert after.mean == pytest.approx(before.mean, abs=0.05)


# Bounds


def test_a_full_table_forgets_what_was_used_longest_ago() -> None:
    memory = LengthMemory(WAYS)
    for name in range(1, 9):
        teach(memory, 10, keys=chain(name))
    teach(memory, 10, keys=chain(1))
    for name in range(20, 28):
        teach(memory, 10, keys=chain(name))
    assert memory.known == WAYS
    assert recall(memory, ALICE, 1).known == 1
    assert recall(memory, ALICE, 2).known == 0


def test_memory_does_not_grow_with_clients_or_models() -> None:
    memory = LengthMemory(256)
    size = memory.nbytes
    for client in range(MOST_CLIENTS + 500):
        recalled = memory.recall(client % 700, client, chain(client + 1))
        memory.learn(recalled, 100)
    *_, kept = memory.copied()
    assert memory.nbytes == kept.nbytes == size
    assert len(memory._clients) == MOST_CLIENTS
    assert len(memory._models) <= 700


def test_a_forgotten_client_takes_its_share_with_it() -> None:
    memory = LengthMemory(256)
    teach(memory, LONGEST, 20, BOB)
    for client in range(100, 100 + MOST_CLIENTS):
        teach(memory, 100, 1, client)
    model = memory._models[MODEL]
    means = [one.weight * one.mean for one in memory._clients.values()]
    assert model.mean == pytest.approx(sum(means))


# Files


def test_a_memory_is_the_same_after_a_restart(tmp_path: Path) -> None:
    memory = LengthMemory(1 << 12)
    for i in range(60):
        teach(memory, 10 * i + 1, 1, ALICE if i % 3 else BOB, chain(1, i % 7, i))
    path = tmp_path / "past.msgpack"
    *_, copy = memory.copied()
    copy.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = LengthMemory.load(path, 1 << 12)
    assert again.salt == memory.salt
    assert again.known == memory.known
    for client in (ALICE, BOB, 5):
        for names in ((1, 2), (1, 2, 9), (3,)):
            assert recall(again, client, *names).length == pytest.approx(
                recall(memory, client, *names).length
            )


def test_a_smaller_memory_takes_the_latest_of_a_file(tmp_path: Path) -> None:
    memory = LengthMemory(1 << 12)
    for i in range(1, 2000):
        teach(memory, 100, keys=chain(i))
    memory.save(tmp_path / "past")
    small = LengthMemory.load(tmp_path / "past", 64)
    assert small.known == 64
    assert recall(small, ALICE, 1999).known == 1
    assert recall(small, ALICE, 1).known == 0


def test_a_memory_goes_on_learning_after_a_restart(tmp_path: Path) -> None:
    memory = LengthMemory(256)
    teach(memory, 100, 5)
    memory.save(tmp_path / "past")
    again = LengthMemory.load(tmp_path / "past", 256)
    teach(again, 5000, 60)
    assert recall(again).length.expected() > 3000


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("past") / "past"
    path.write_bytes(data)
    with pytest.raises(PastError, match="no memory of lengths"):
        LengthMemory.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("count", np.nan), ("count", 1e6), ("mean", -1.0), ("mean", 1e9), ("error", np.inf)],
)
def test_a_file_with_impossible_figures_is_refused(
    tmp_path: Path, field: str, value: float
) -> None:
    memory = LengthMemory(256)
    teach(memory, 100, keys=chain(1))
    memory._table[field][memory._table["key"] != 0] = value
    memory.save(tmp_path / "past")
    with pytest.raises(PastError, match="a count, mean or error"):
        LengthMemory.load(tmp_path / "past")


def test_a_file_that_is_too_large_or_has_too_many_clients_is_refused(tmp_path: Path) -> None:
    path, clients = tmp_path / "past", [[i, 1, 1.0, 1.0, 1.0] for i in range(MOST_CLIENTS + 1)]
    kept = {"version": 1, "salt": bytes(32), "number": 0, "clients": clients, "entries": b""}
    path.write_bytes(msgspec.msgpack.encode(kept))
    with pytest.raises(PastError, match="clients"):
        LengthMemory.load(path)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(PastError, match="larger than"):
        LengthMemory.load(path, 256)
