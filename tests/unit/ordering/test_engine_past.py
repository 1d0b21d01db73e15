"""What an engine's past says of what waits in its queue."""

import logging
import math
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued_by_vllm import QueuedByVllm, engine_order, names

from predictor.past import length_memory
from predictor.past.length_memory import LengthMemory
from rescheduler.ordering.engine_order import EngineOrder
from rescheduler.ordering.engine_past import EnginePast, token_keys
from rescheduler.ordering.service_order import MOST_PAST_KEYS, read_engine_order

SALT = bytes(32)
PROMPTS = st.lists(st.integers(0, 3), max_size=700)


@given(PROMPTS, PROMPTS, PROMPTS)
def test_prompts_have_keys_in_common_as_far_as_they_begin_alike(
    begins: list[int], one: list[int], other: list[int]
) -> None:
    keys = [token_keys(begins + rest, SALT).tolist() for rest in (one, other)]
    alike = sum(end <= len(begins) for end in range(16, 256, 16))
    alike += sum(end <= len(begins) for end in range(256, 4_000, 256))
    alike = min(alike, *(len(found) - 1 for found in keys))
    assert keys[0][:alike] == keys[1][:alike]
    assert (keys[0] == keys[1]) == (one == other)
    assert (keys[0][-1] == keys[1][-1]) == (one == other)


def test_a_long_prompt_is_read_up_to_its_65536th_token() -> None:
    one, other = ([*[1] * 65_536, *rest] for rest in ([1], [2, 3]))
    assert token_keys(one, SALT).tolist() == token_keys(other, SALT).tolist()
    assert len(token_keys([], SALT)) == 1


def ended(order: EngineOrder, begins: int, tokens: int, **others: object) -> None:
    request = asks("ended", begins, **others)
    request.num_output_tokens = tokens
    order.ended(request)


def asks(name: str, begins: int, **others: object) -> QueuedByVllm:
    """Return a request whose prompt begins like those with the same number."""
    request = QueuedByVllm(name, 0, 4_000)
    generator = random.Random(name)
    request.prompt_token_ids = [begins] * 64 + [generator.randrange(9) for _ in range(50)]
    request.num_tokens = 114
    vars(request).update(others)
    return request


def test_what_waits_is_expected_to_be_answered_as_its_prefix_was() -> None:
    made = engine_order()
    for _ in range(10):
        ended(made, 1, 900)
        ended(made, 2, 20)
    made.scheduler.waiting.extend([asks("long", 1), asks("short", 2), asks("longer", 1)])
    made.before_scheduling()
    assert names(made) == ["short", "long", "longer"]
    assert made._expected["short"] < 40 < 600 < made._expected["long"]
    for request in list(made.scheduler.waiting):
        made.ended(request)
    assert made._past is not None
    assert made._past._recalled == made._expected == {}


def test_salts_of_the_cache_and_adapters_keep_lengths_apart() -> None:
    past = EnginePast("m", 1 << 12)
    for _ in range(10):
        request = asks("a", 1, cache_salt="theirs")
        request.num_output_tokens = 900
        past.ended(request, by_itself=True, cut=False)
    assert past.expected(asks("b", 1, cache_salt="theirs")) > 600  # type: ignore[operator]
    assert past.expected(asks("c", 1, cache_salt="ours")) is None
    assert past.expected(asks("d", 1)) is None


def test_what_others_end_teaches_nothing_and_what_is_cut_would_be_longer() -> None:
    past = EnginePast("m", 1 << 12)
    request = asks("a", 1)
    request.num_output_tokens = 900
    past.ended(request, by_itself=False, cut=False)
    assert past.expected(asks("b", 1)) is None
    request.num_output_tokens = 30
    for _ in range(10):
        past.ended(request, by_itself=True, cut=True)
    expected = past.expected(asks("c", 1))
    assert expected is not None and expected > 60


def test_a_checkpoint_or_no_keys_keeps_nothing() -> None:
    checkpoint = "checkpoints/smollm2-135m-instruct-prompt"
    assert engine_order(name="shortest", prompt_checkpoint=checkpoint)._past is None
    assert engine_order(name="shortest", past=0)._past is None
    assert engine_order(name="fcfs")._past is None
    assert engine_order(name="boost", past=1 << 10)._past is not None


@pytest.mark.parametrize("keys", [True, -1, 1.5, "many", None, MOST_PAST_KEYS + 1])
def test_keys_that_cannot_be_are_refused(keys: object) -> None:
    with pytest.raises(ValueError, match=r"order\.past: keys, 0 to 16777216, not "):
        read_engine_order({"headway": {"order": {"name": "boost", "past": keys}}})


def test_a_request_that_cannot_be_recalled_is_like_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = asks("odd", 1)
    odd.prompt_token_ids = [2**70]
    made = engine_order(odd, asks("b", 1), asks("c", 1))
    with caplog.at_level(logging.ERROR, "vllm.headway.order"):
        made.before_scheduling()
        odd.num_output_tokens = 5
        made.ended(odd)
    assert made.scheduler.failures == 0
    assert len(caplog.records) == 2
    assert sorted(names(made)) == ["b", "c", "odd"]
    assert made._expected == {"b": 256.0, "c": 256.0}


def test_an_order_is_whole_though_few_are_recalled_at_a_time() -> None:
    requests = [asks(str(i), i % 3) for i in range(150)]
    made = engine_order(*requests)
    for known in (64, 128, 150):
        made._order_at = -math.inf
        made.before_scheduling()
        assert len(made._expected) == known
    assert np.isfinite([*made._expected.values()]).all()


# A file


def taught(order: EngineOrder) -> None:
    for _ in range(10):
        ended(order, 1, 900)
        ended(order, 2, 20)


def knows(order: EngineOrder) -> bool:
    """Return whether an engine tells apart what it was taught."""
    assert order._past is not None
    expected = [order._past.expected(asks(f"new {i}", i)) for i in (1, 2)]
    return None not in expected and expected[1] < 40 < 600 < expected[0]  # type: ignore[operator]


def test_an_engine_knows_the_past_after_a_restart(tmp_path: Path) -> None:
    file = str(tmp_path / "folder" / "past")
    made = engine_order(name="boost", past_file=file)
    taught(made)
    assert knows(made)
    assert not knows(engine_order(name="boost", past_file=file))
    made.shutdown()
    assert knows(engine_order(name="boost", past_file=file))
    assert (tmp_path / "folder" / "past").stat().st_mode & 0o777 == 0o600


def test_each_rank_of_an_engine_has_a_file_of_its_own(tmp_path: Path) -> None:
    file = str(tmp_path / "past")
    for rank in (0, 1):
        made = engine_order(name="boost", past_file=file, rank=rank)
        if rank == 1:
            taught(made)
        made.shutdown()
    assert not knows(engine_order(name="boost", past_file=file))
    assert knows(engine_order(name="boost", past_file=file, rank=1))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["past", "past.rank1"]


def test_an_engine_that_is_killed_loses_a_minute_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length_memory, "_SETS_AT_ONCE", 64)
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = tmp_path / "past"
    made = engine_order(name="boost", past=1 << 14, past_file=str(file))
    taught(made)
    now = 1_059.0
    made.before_scheduling()
    assert not file.exists()
    steps = 0
    while made._past is not None and made._past._writer is None:
        now += 1.0
        made.before_scheduling()
        steps += 1
    assert steps > 1_024 // 64  # a part of the table at each of them
    made._past._writer.join()  # type: ignore[union-attr]
    assert knows(engine_order(name="boost", past=1 << 14, past_file=str(file)))
    assert made.scheduler.failures == 0


def test_no_second_writer_begins_while_one_waits_for_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, begun, full = [], threading.Event(), threading.Event()

    def save(memory: LengthMemory, path: Path) -> None:
        writes.append(path)
        begun.set()
        full.wait()

    monkeypatch.setattr(LengthMemory, "save", save)
    past = EnginePast("m", 1 << 10, str(tmp_path / "past"))
    for _ in range(10):
        past._keep_at = -math.inf
        past.keep()
    assert begun.wait(60) and len(writes) == 1
    full.set()
    past.close()
    assert len(writes) == 2


def test_a_file_that_cannot_be_used_stops_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "past"
    file.write_bytes(b"no memory")
    made = engine_order(name="boost", past_file=str(file))
    assert "headway.order.past_file: begins anew" in caplog.text
    assert (tmp_path / "past.refused").read_bytes() == b"no memory"
    taught(made)
    file.mkdir()
    assert made._past is not None and made._past._file is not None
    made._past._file.save(made._past._memory)
    made.shutdown()
    assert caplog.text.count("only the first failure") == 1


def test_an_engine_goes_on_without_memory_or_threads_to_keep_its_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine_order(name="shortest", past_file=str(tmp_path / "past"))
    taught(made)
    made.scheduler.waiting.extend([asks("long", 1), asks("short", 2)])

    def fails(*_: object) -> None:
        raise MemoryError

    for broken in ((threading.Thread, "start"), (np, "empty_like")):
        with monkeypatch.context() as patch:
            patch.setattr(*broken, fails)
            assert made._past is not None
            made._past._keep_at = -math.inf
            for _ in range(20):
                made._order_at = -math.inf
                made.before_scheduling()
        assert made._past._copying is made._past._copy is made._past._writer is None
        assert "not kept this time" in caplog.text
        caplog.clear()
    assert names(made) == ["short", "long"]
    assert made.scheduler.failures == 0
    made.shutdown()
    assert knows(engine_order(name="shortest", past_file=str(tmp_path / "past")))


def test_another_model_s_lengths_say_nothing_of_this_one_s(tmp_path: Path) -> None:
    file = str(tmp_path / "past")
    for model, kept in (("a", True), ("b", False), ("a", True)):
        past = EnginePast(model, 1 << 12, file)
        assert (past.expected(asks("new", 1)) is not None) == (kept and Path(file).exists())
        if not Path(file).exists():
            for _ in range(3):
                request = asks("ended", 1)
                request.num_output_tokens = 900
                past.ended(request, by_itself=True, cut=False)
        past.close()


def test_where_no_file_can_be_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"headway\.order\.past_file: .* is not a regular file"):
        engine_order(name="boost", past_file=str(tmp_path))


@pytest.mark.parametrize("given", ["", "~/past/", 5, True, ["past"], {}])
def test_a_file_that_is_no_name_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"order\.past_file: a file, not "):
        read_engine_order({"headway": {"order": {"name": "boost", "past_file": given}}})


@pytest.mark.parametrize(
    "others", [{"past": 0}, {"prompt_checkpoint": "runs/prompt"}, {"name": "fcfs"}]
)
def test_a_file_of_which_nothing_would_be_read_is_refused(others: dict[str, object]) -> None:
    order = {"name": "boost", "past_file": "past"} | others
    with pytest.raises(ValueError, match=r"past_file: an engine learns nothing .* leave it out"):
        read_engine_order({"headway": {"order": order}})
