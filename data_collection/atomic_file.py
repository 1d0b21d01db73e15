"""Files that are either whole or absent."""

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "create_private_folder",
    "refuse_unwritable",
    "replace_file",
    "warn_of_open_secret",
    "write_text_atomically",
]

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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
