"""What becomes of a file of lengths when several write it, or one for the last time."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from predictor.past.length_memory import LengthMemory
from predictor.past.memory_file import MemoryFile

LOGGER = logging.getLogger("headway.serve")


def memory(lengths: int) -> LengthMemory:
    made = LengthMemory(1 << 12, bytes(32))
    for i in range(lengths):
        made.learn(made.recall(1, 1, np.array([i + 1], dtype=np.uint64)), 100)
    return made


@pytest.mark.parametrize("files", [1, 2])
def test_a_file_that_several_write_at_once_is_one_of_theirs(
    files: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [MemoryFile(str(tmp_path / "past"), "past.file", LOGGER) for _ in range(files)]
    sizes = [1, 50, 300, 700]
    memories = [memory(size) for size in sizes]
    known = {one.known for one in memories}
    with ThreadPoolExecutor(4) as threads:
        for _ in range(25):
            list(threads.map(lambda i: kept[i % files].save(memories[i]), range(4)))
            assert LengthMemory.load(tmp_path / "past", 1 << 12).known in known
    assert not caplog.records
    assert [one.name for one in tmp_path.iterdir()] == ["past"]


def test_nothing_is_written_once_it_is_closed(tmp_path: Path) -> None:
    kept, last = MemoryFile(str(tmp_path / "past"), "past.file", LOGGER), memory(300)
    kept.save(memory(50))
    kept.close(last)
    kept.save(memory(1))
    kept.close(memory(1))
    assert LengthMemory.load(tmp_path / "past", 1 << 12).known == last.known


def test_a_lack_of_memory_is_a_failure_like_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(LengthMemory, "_entries", fails)
    kept = MemoryFile(str(tmp_path / "past"), "past.file", LOGGER)
    kept.save(memory(1))
    kept.close(memory(1))
    assert caplog.text.count("past.file: MemoryError()") == 1
    assert not [*tmp_path.iterdir()]
