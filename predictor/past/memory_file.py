"""A file that keeps a memory of lengths across restarts, whatever happens to the file."""

import logging
from pathlib import Path
from threading import Lock

from predictor.past.length_memory import LengthMemory, PastError


class MemoryFile:
    """Reads a memory as its owner starts, and writes it: what fails is logged and stops nobody.

    Args:
        file: its path; the folder is made.
        option: by which users gave it, for messages.
        logger: that they read.

    Attributes:
        usable: whether anything is written.

    Raises:
        PastError: no file could be there.
    """

    def __init__(self, file: str, option: str, logger: logging.Logger) -> None:
        self._option, self._logger = option, logger
        self.usable, self._failed = True, False
        self._writes = Lock()
        try:
            self._path = Path(file).expanduser()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fits = "\0" not in file and not file.endswith("/")
            fits = fits and (self._path.is_file() or not self._path.exists())
        except (OSError, RuntimeError, ValueError) as error:
            raise PastError(f"{option}: {file!r}: {error}") from error
        if not fits:
            raise PastError(f"{option}: {file!r} is not a regular file")

    def load(self, keys: int, salt: bytes | None = None) -> LengthMemory:
        """Return the memory in the file, or a new one.

        A file that cannot be used is put beside what will be written; one that cannot be read is
        left alone.

        Args:
            keys: most that are known.
            salt: that the memory must have; None: whichever the file has.
        """
        path, new = self._path, LengthMemory(keys, salt)
        if not path.exists():
            return new
        try:
            kept = LengthMemory.load(path, keys)
            if salt in (None, kept.salt):
                return kept
            reason = f"{path}: digests by another salt than this deployment's"
        except PastError as error:
            reason = str(error)
        except OSError as error:
            self._warn(f"begins anew, and keeps nothing: {error}")
            self.usable = False
            return new
        other = path.with_name(f"{path.name}.refused")
        self._warn(f"begins anew: {reason}; it is {other.name} now")
        try:
            path.replace(other)
        except OSError as error:
            self._warn(f"keeps nothing: {error}")
            self.usable = False
        return new

    def save(self, memory: LengthMemory) -> None:
        """Write a memory in place of the earlier one, as a whole."""
        with self._writes:
            if self.usable:
                self._save(memory)

    def close(self, memory: LengthMemory) -> None:
        """Write a memory for the last time: what a thread would still write is older."""
        with self._writes:
            if self.usable:
                self._save(memory)
            self.usable = False

    def _save(self, memory: LengthMemory) -> None:
        try:
            memory.save(self._path)
        except Exception as error:  # such as a lack of memory
            if not self._failed:
                self._warn(f"{error!r}; only the first failure is shown")
            self._failed = True

    def _warn(self, text: str) -> None:
        self._logger.warning("%s: %s", self._option, text)
