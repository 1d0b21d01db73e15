"""Text that people give: however an editor saved it, and what is no text."""

import bz2
import gzip
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import TRUE, profile_of

from data_collection import text_file
from data_collection.text_file import read_text, read_yaml, text_lines
from data_collection.workload.prompts import load_prompts
from data_collection.workload.transcripts import load_transcripts
from predictor.models.checkpoint import read_config
from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import ProxyOptions
from rescheduler.monitoring.finished_log import LoggedRequest, read_finished_log
from rescheduler.placement.upstream import engine_key
from rescheduler.step_time.profile import load_profile, write_profile
from rescheduler.step_time.step_log import StepLog, read_engine, read_steps

TEXT = st.text(st.characters(exclude_characters="\r\n\0\ufeff", codec="utf-8"))
BOM = b"\xef\xbb\xbf"
LOGGED = LoggedRequest("a", "gpu0", "m", "0123", "stop", 40, [0], [0.5], False, [9.0])


def profile(path: Path) -> None:
    write_profile(profile_of(TRUE), path)


def steps(path: Path) -> None:
    log = StepLog(path, profile_of(TRUE).engine)
    log.add(4, 800, 0.25)
    log.close()


def engine(path: Path) -> None:
    steps(path.with_name("log"))
    path.write_bytes(path.with_name("log.engine.json").read_bytes())


def saying(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def load_prompts_of(path: Path) -> object:
    return load_prompts(str(path))


FILES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "prompts.jsonl": (
        saying(b'{"prompt": "a"}\n\n{"prompt": "b"}\n'),
        load_prompts_of,
    ),
    "answers.jsonl": (saying(b'{"prompt": "a", "answer": "b"}\n'), load_transcripts),
    "config.yaml": (saying(b"seeds: 1\ntrace: {name: star}\n"), read_yaml),
    "config.json": (saying(b'{"kind": "survival"}\n'), lambda path: read_config(path.parent)),
    "finished.jsonl": (
        saying(msgspec.json.encode(LOGGED) + b"\n"),
        lambda path: list(read_finished_log(path)),
    ),
    "profile.yaml": (profile, load_profile),
    "steps.csv": (steps, lambda path: read_steps(path).tolist()),
    "steps.csv.engine.json": (engine, lambda path: read_engine(path.with_name("steps.csv"))),
    "key": (saying(b"secret\n"), lambda path: engine_key(ProxyOptions(engine_key_file=str(path)))),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "saved",
    [
        lambda content: BOM + content,
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: content.replace(b"\n", b"\r"),
        lambda content: gzip.compress(BOM + content, mtime=0),
    ],
    ids=["byte-order mark", "CRLF", "CR", "gzip"],
)
def test_how_a_text_is_saved_changes_nothing(
    tmp_path: Path, name: str, saved: Callable[[bytes], bytes]
) -> None:
    write, read = FILES[name]
    path = tmp_path / name
    write(path)
    as_it_was = read(path)
    path.write_bytes(saved(path.read_bytes()))
    assert read(path) == as_it_was


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_to_be_saved_as_utf_8(tmp_path: Path, name: str, encoding: str) -> None:
    write, read = FILES[name]
    path = tmp_path / name
    write(path)
    path.write_bytes(path.read_text().encode(encoding))
    with pytest.raises(ValueError, match=rf"{name}.*save it as UTF-8") as refusal:
        read(path)
    assert len(str(refusal.value).splitlines()) == 1


@fuzzed()
@given(
    lines=st.lists(
        st.text(st.characters(exclude_characters="\r\n\0\ufeff", codec="utf-8")), min_size=1
    ),
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
        (b"a\n" + bytes(500), r"file:2: holds NUL bytes"),
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


def test_a_small_file_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a: 1\n" * 300_000)
    with pytest.raises(ValueError, match="file: over 1 MiB, too large"):
        read_text(path, largest=1 << 20)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
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
    monkeypatch.setattr(text_file, "_PIPE_SECONDS", 0.01)
    with pytest.raises(ValueError, match="pipe: nothing was written to this pipe in"):
        read_text(pipe)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seeds: 1\n".encode("utf-16"), "c.yaml: UTF-16 text; save it as UTF-8"),
        (b"seeds: 1\0\n", "c.yaml:1: holds NUL bytes"),
        (gzip.compress(b"seeds: 1\n", mtime=0), "c.yaml: not plain UTF-8 text"),
    ],
)
def test_a_verb_names_a_configuration_that_is_no_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    message: str,
) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    monkeypatch.setattr("sys.argv", ["headway", "simulate", "--config", str(path)])
    assert main() == 1
    assert message in capsys.readouterr().err


def test_a_file_of_one_json_value_is_told_how_to_become_lines(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text('[\n  {"prompt": "a"}\n]\n')
    with pytest.raises(ValueError, match="line 1: JSON Lines have one object a line, as `jq -c`"):
        load_prompts(str(path))
