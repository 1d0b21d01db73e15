"""Files that people give, in UTF-8, that come with Headway, and that are either whole or absent."""

import gzip
import io
import logging
import os
import select
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

import yaml

_MARK = "\ufeff"
"""The byte-order mark, which some editors write before the text, and joined files have within."""

_LONGEST_LINE = 64 << 20
_LARGEST_TEXT = 64 << 20
_PIPE_SECONDS = 10
_NOT_TEXT = {
    b"PK\x03\x04": "a zip archive; unpack it, or pack it with gzip",
    b"BZh91AY&SY": "compressed by bzip2; unpack it, or pack it with gzip",
    b"\xfd7zXZ": "compressed by xz; unpack it, or pack it with gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it, or pack it with gzip",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x00\x00\xfe\xff": "UTF-32 text; save it as UTF-8",
}
_INSTALLED = Path(__file__).parent / "shipped"
_FOLDER = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1]
_SHIPPED = ("checkpoints", "configs", "recordings")
"""The configurations, checkpoints and recordings that come with Headway: a checkout has them at its
root, an installation within this package (see setup.py). They have the same relative paths in both:
``checkpoints/rl-router`` is found from every folder."""


class ParquetFileError(ValueError):
    """A Parquet file is no text."""


def read_text(path: Path) -> str:
    """Return the text of a small file, such as a configuration; line ends become newlines.

    Raises:
        ValueError: the file cannot be read, is larger, or is no text; names file and line.
    """
    lines, size = [], 0
    for line in text_lines(path):
        size += len(line)
        if size > _LARGEST_TEXT:
            raise ValueError(f"{path}: over {_LARGEST_TEXT >> 20} MiB, too large for such a file")
        lines.append(line)
    return "".join(lines).replace("\r\n", "\n").replace("\r", "\n")


def text_lines(
    path: Path, longest: int = _LONGEST_LINE, half_line: bool = True, again: bool = False
) -> Iterator[str]:
    r"""Yield the lines of a file with their line ends, which may be ``\n``, ``\r\n`` or ``\r``.

    A byte-order mark at the beginning of a line is left out. What is gzipped is unpacked,
    whatever the file is called.

    Args:
        path: of the file; a pipe can be read once.
        longest: characters of a line, above which it is refused.
        half_line: whether the last line may lack its end; a log that is being written has half a
            line there, which is left out.
        again: whether the file will be read again, which a pipe cannot.

    Raises:
        ValueError: the file cannot be read, or a line is too long or is no text; names the file,
            and the line where there is one.
    """
    number = 1
    try:
        with _opened(path, again) as file:
            while line := file.readline(longest):
                if len(line) == longest:
                    raise ValueError(f"{path}:{number}: a line of over {longest >> 20} MiB")
                if not half_line and not line.endswith(("\n", "\r")):
                    return
                if not line.isascii():
                    _refuse_other_encodings(path, number, line)
                if "\0" in line:
                    raise ValueError(
                        f"{path}:{number}: holds NUL bytes, as UTF-16 and damaged files do; save "
                        "it as UTF-8"
                    )
                number += 1
                if line := line.removeprefix(_MARK):
                    yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number}: the gzip file is not whole: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def _opened(path: Path, again: bool) -> Iterator[io.TextIOWrapper]:
    """Yield the file as text; a byte that is no UTF-8 becomes half of a surrogate pair."""
    # Without O_NONBLOCK, opening a named pipe that has no writer would block.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as raw:
        kind = os.fstat(raw.fileno()).st_mode
        if stat.S_ISDIR(kind):
            raise ValueError(f"{path}: cannot be read: Is a directory")
        if stat.S_ISFIFO(kind):
            _await_writer(path, raw, again)
        elif not stat.S_ISREG(kind):
            raise ValueError(f"{path}: cannot be read: a device, not a file")
        os.set_blocking(raw.fileno(), True)
        beginning = raw.peek(10)[:10]
        if beginning.startswith(b"PAR1\x15"):
            raise ParquetFileError(f"{path}: a Parquet file, not text")
        for magic, what in _NOT_TEXT.items():
            if beginning.startswith(magic):
                raise ValueError(f"{path}: {what}")
        zipped = beginning[:2] == b"\x1f\x8b"
        with (
            gzip.GzipFile(fileobj=raw) if zipped else raw as binary,
            io.TextIOWrapper(
                binary, encoding="utf-8", errors="surrogateescape", newline=""
            ) as file,
        ):
            yield file


def _await_writer(path: Path, raw: BinaryIO, again: bool) -> None:
    if again:
        raise ValueError(f"{path}: a pipe, which can be read only once; save it as a file first")
    waiting = select.poll()
    waiting.register(raw.fileno(), select.POLLIN)
    if not waiting.poll(1000 * _PIPE_SECONDS):
        raise ValueError(f"{path}: nothing was written to this pipe in {_PIPE_SECONDS} s")


def _refuse_other_encodings(path: Path, number: int, line: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) - 0xDC00
        where = f"{path}:{number}"
        if number == 1 and line[:2] in ("\udcff\udcfe", "\udcfe\udcff"):  # inside gzip
            raise ValueError(f"{where}: UTF-16 text; save it as UTF-8") from None
        raise ValueError(
            f"{where}: not UTF-8: byte 0x{byte:02x} after {line[: error.start][-20:]!r}; save it "
            "as UTF-8"
        ) from None


class _Loader(yaml.SafeLoader):
    """Refuses text that holds half of a surrogate pair."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        text = super().construct_scalar(node)
        text.encode()
        return text


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        ValueError: the file cannot be read; says why in one line.
    """
    text = read_text(path)
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError(f"{path}: invalid YAML: it is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # PyYAML's, as for 2001-13-01
        raise ValueError(f"{path}: invalid YAML: {error}") from error
    except (LookupError, AttributeError) as error:  # PyYAML's, as for "!!bool x"
        raise ValueError(f"{path}: invalid YAML: a value does not fit its tag") from error


logger = logging.getLogger("headway.secrets")

_OPEN = stat.S_IRWXO | stat.S_IWGRP  # a Kubernetes volume may be its group's to read


def create_private_folder(path: Path) -> None:
    """Create a folder that only its owner can look into; leave one that exists as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def refuse_unwritable(path: Path) -> None:
    """Raise now what writing a file after long work would raise.

    Raises:
        OSError: it is a folder or a device, or its folder does not exist or cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    _refuse_special(path)
    if not os.access(path.parent, os.W_OK):
        reason = "cannot be written" if path.parent.exists() else "does not exist"
        raise OSError(f"{path}: its folder {reason}")


def _refuse_special(path: Path) -> None:
    """Refuse a device, a pipe or a socket, which a rename would replace."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(f"{path} is not a regular file, and would be replaced by one")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it takes the place of ``path``.

    The temporary file is flushed to the disk before the rename, and removed when the body
    fails, so that a killed process or a full disk never leaves half a file under ``path``.

    Raises:
        OSError: it cannot be written, or is a device, a pipe or a socket.
    """
    _refuse_special(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, whole or not at all."""
    with replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def warn_of_open_secret(path: Path) -> None:
    """Warn if a file with a key or a token can be read by every user, or written by its group."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OPEN:
        message = "%s: other users of this machine can use this secret (mode %04o): chmod 600 %s"
        logger.warning(message, path, mode, path)


def find_shipped(path: Path | str) -> Path:
    """Return a path as it is; where it leads nowhere, the shipped file or folder of that path."""
    path = Path(path)
    shipped = _FOLDER / path
    is_shipped = path.parts[:1] in [(name,) for name in _SHIPPED] and ".." not in path.parts
    return shipped if is_shipped and not path.exists() and shipped.exists() else path


def shipped_configs(folder: str) -> list[str]:
    """Return the names of the shipped configurations in a folder of ``configs``."""
    return sorted(path.stem for path in (_FOLDER / "configs" / folder).glob("*.yaml"))


def find_config(name: str) -> Path:
    """Return the file of that path, or the shipped configuration of that name.

    A name is the last parts of its path, with or without suffix: ``local-pd``, ``serve/local-pd``.

    Raises:
        ValueError: there is neither, or several configurations have this name.
    """
    path = find_shipped(Path(name).expanduser())
    if path.exists() and not path.is_dir():  # but a pipe, too
        return path
    configs = _FOLDER / "configs"
    known = {str(one.relative_to(configs).with_suffix("")): one for one in configs.rglob("*.yaml")}
    wanted = name.removesuffix(".yaml")
    meant = sorted(one for one in known if f"/{one}".endswith(f"/{wanted}"))
    if len(meant) == 1:
        return known[meant[0]]
    if meant:
        raise ValueError(f"several configurations are called {name}: {', '.join(meant)}")
    names = {one.rpartition("/")[2] for one in known}
    near = get_close_matches(wanted.rpartition("/")[2], sorted(names), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{name}: no such file, and no configuration of this name is shipped{hint}")
