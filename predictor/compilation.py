"""How the hot paths are compiled by numba, and where their machine code is kept."""

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from numba import config, njit

__all__ = ["VersionLocator", "compiled", "compiled_core", "compiled_inline", "is_kept"]

P = ParamSpec("P")
R = TypeVar("R")

_ROOT = Path(__file__).resolve().parents[1]
_COMPILED_PACKAGES = ("predictor", "rescheduler")
_KEPT = 16
"""Versions of the packages whose machine code is kept: those last used."""
_NUMBA_LOCATORS = (
    *("UserProvidedCacheLocator", "InTreeCacheLocator", "UserWideCacheLocator"),
    *("IPythonCacheLocator", "ZipCacheLocator"),
)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that may allocate arrays; other threads run meanwhile."""
    return _njit(function, _nrt=True)


def compiled_core(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that allocates nothing, to be called from others of its kind.

    numba counts the references to every array of a tuple at each call, which takes longer than
    the engine's work on them. Code that only borrows arrays can do without.
    """
    return _njit(function, _nrt=False)


def compiled_inline(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function as `compiled_core` does, in line where it is called.

    For what is small, or is called from one place: to hand the engine's state over takes longer
    than most of what is done to it in a step.
    """
    return _njit(function, _nrt=False, forceinline=True)


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether an earlier process compiled this function, so that it loads fast."""
    python = getattr(function, "py_func", function)
    locator = VersionLocator(python, python.__code__.co_filename)
    return any(Path(locator.get_cache_path()).glob(f"*-{locator.get_disambiguator()}.*.nbi"))


def _njit(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    made: Callable[P, R] = njit(cache=True, nogil=True, **options)(function)
    return made


class VersionLocator:
    """Keep machine code in the user's cache, in one folder for each version of the packages.

    numba looks at the path and the time of a function's own file: after an update it would go on
    using callees and constants of other files as they were, and in a fresh clone it would compile
    everything again. Here the folder is named by the contents of all compiled packages.
    """

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        file = Path(py_file).resolve()
        if file.is_relative_to(_ROOT):
            name = ".".join(file.relative_to(_ROOT).with_suffix("").parts)
        else:
            name = file.stem
        if name.partition(".")[0] not in _COMPILED_PACKAGES:
            name += "-" + hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        self._name = f"{name}-{py_func.__code__.co_firstlineno}"

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "VersionLocator | None":
        """Return a locator, or None for code that is not of the packages and uses none of them."""
        file = Path(py_file)
        uses = rf"^\s*(?:from|import)\s+(?:{'|'.join(_COMPILED_PACKAGES)})\b"
        if not file.is_file() or not re.search(uses, file.read_text("utf-8"), re.MULTILINE):
            return None
        return cls(py_func, py_file)

    def ensure_cache_path(self) -> None:
        """Create the folder again if another process has removed it."""
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        """Return the folder of this version of the packages."""
        return str(_folder(config.CACHE_DIR))

    def get_source_stamp(self) -> str:
        """Return what changes with the sources: nothing beyond the folder and the name."""
        return ""

    def get_disambiguator(self) -> str:
        """Return what distinguishes functions of one name."""
        return self._name


@cache
def _folder(chosen: str) -> Path:
    """Return where this version is kept: the user's folder, or one for this process alone.

    Never one of numba's own choice, which would be read again after a change elsewhere.
    """
    digest = hashlib.sha256()
    for package in _COMPILED_PACKAGES:
        for source in sorted((_ROOT / package).rglob("*.py")):
            digest.update(str(source.relative_to(_ROOT)).encode() + b"\0" + source.read_bytes())
    try:
        root = Path(chosen or Path.home() / ".cache" / "headway" / "numba")
        folder = root / f"packages-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.utime(folder)  # in use
            with suppress(OSError):  # another process removes them too
                last_used = sorted(root.glob("packages-*"), key=os.path.getmtime)
                for old in last_used[:-_KEPT]:
                    shutil.rmtree(old, ignore_errors=True)
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    own = tempfile.mkdtemp(prefix="headway-numba-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


if not config.CACHE_LOCATOR_CLASSES:
    config.CACHE_LOCATOR_CLASSES = ",".join((f"{__name__}.VersionLocator", *_NUMBA_LOCATORS))
"""Machine code is kept by the sources that it was compiled from."""
