"""Text that people give: however an editor saved it, and what is no text."""

import bz2
import gzip
import os
import threading
from pathlib import Path

import pytest
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st

from data_collection import files
from data_collection.files import read_text, text_lines
from rescheduler.commands.command_line import main

TEXT = st.text(st.characters(exclude_characters="\r\n\0\ufeff", codec="utf-8"))
BOM = b"\xef\xbb\xbf"


@fuzzed()
@given(
    lines=st.lists(TEXT, min_size=1),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    last=st.booleans(),
    mark=st.booleans(),
    zipped=st.booleans(),
)
def test_no_line_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    end: str,
    last: bool,
    mark: bool,
    zipped: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    content = (end.join(lines) + end * last).encode()
    content = BOM * mark + content
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    expected = [*lines] if last else [*lines[:-1], *filter(None, lines[-1:])]
    assert [line.rstrip("\r\n") for line in text_lines(path)] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\0c\n", r"file:2: holds NUL bytes"),
        ("a\ngrün\n".encode("latin-1"), r"file:2: not UTF-8: byte 0xfc after 'gr'; save it as"),
        (gzip.compress("a\n".encode("utf-16"), mtime=0), r"file:1: UTF-16 text; save it as UTF-8"),
        (gzip.compress(b"a\n" * 9, mtime=0)[:-9], r"file:\d+: the gzip file is not whole"),
        (b"PK\x03\x04rest", r"file: a zip archive; unpack it"),
        (bz2.compress(b"a"), r"file: compressed by bzip2"),
        (b"\xfd7zXZ\0", r"file: compressed by xz"),
        (b"\x28\xb5\x2f\xfdrest", r"file: compressed by zstd"),
        (b"PAR1\x15rest", r"file: a Parquet file"),
        (b"ok\n" + b"x" * (2 << 20), r"file:2: a line of over 1 MiB"),
    ],
)
def test_what_is_no_text_is_named_by_file_and_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        list(text_lines(path, longest=1 << 20))
    assert len(str(refusal.value).splitlines()) == 1


def test_what_is_no_small_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LARGEST_TEXT", 1 << 20)
    path = tmp_path / "large"
    path.write_bytes(b"a: 1\n" * 300_000)
    with pytest.raises(ValueError, match="large: over 1 MiB, too large"):
        read_text(path)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="/dev/zero: cannot be read: a device"):
        read_text(Path("/dev/zero"))
    with pytest.raises(ValueError, match="nowhere: cannot be read: No such file"):
        read_text(tmp_path / "nowhere")


def test_a_pipe_is_read_once_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="pipe: a pipe, which can be read only once"):
        list(text_lines(pipe, again=True))
    writer = threading.Thread(target=pipe.write_text, args=("a: 1\n",))
    writer.start()
    assert read_text(pipe) == "a: 1\n"
    writer.join()
    monkeypatch.setattr(files, "_PIPE_SECONDS", 0.01)
    with pytest.raises(ValueError, match="pipe: nothing was written to this pipe in"):
        read_text(pipe)


def test_a_verb_names_a_configuration_that_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    monkeypatch.setattr("sys.argv", ["headway", "simulate", "--config", str(path)])
    for content, message in (
        ("seeds: 1\n".encode("utf-16"), "c.yaml: UTF-16 text; save it as UTF-8"),
        (gzip.compress(b"seeds: 1\n", mtime=0), "c.yaml: not plain UTF-8 text"),
    ):
        path.write_bytes(content)
        assert main() == 1
        assert message in capsys.readouterr().err
