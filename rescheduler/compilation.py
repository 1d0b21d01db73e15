"""How the hot paths are compiled by numba, and where their machine code is kept."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from numba import config, njit

__all__ = ["compiled", "compiled_core", "compiled_inline", "is_kept"]

P = ParamSpec("P")
R = TypeVar("R")

_KEPT = 5
_CONSTANTS = ("cluster_view.py", "engine_records.py", "engine_state.py")
"""Files without compiled functions, whose constants are compiled in."""


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


def is_kept(name: str) -> bool:
    """Say whether an earlier process has compiled ``module.function``, so that it loads fast."""
    return any(Path(config.CACHE_DIR).rglob(f"{name}-*.nbi"))


def _njit(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    made: Callable[P, R] = njit(cache=True, nogil=True, **options)(function)
    return made


def _keep_code_by_source() -> None:
    """Keep machine code in a folder of the user's cache, one for each state of the sources.

    numba looks at a function's own file alone: after an update it would go on using callees and
    constants of other files as they were.
    """
    if config.CACHE_DIR:
        return
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in ("predictor", "rescheduler"):
        for source in sorted((root / package).rglob("*.py")):
            text = source.read_bytes()
            if source.name in _CONSTANTS or b"@compiled" in text or b"@njit" in text:
                digest.update(text)
    caches = Path.home() / ".cache" / "headway" / "numba"
    mine = caches / digest.hexdigest()[:16]
    config.CACHE_DIR = str(mine)
    if caches.is_dir() and not mine.is_dir():
        newest_first = sorted(caches.iterdir(), key=lambda cache: -cache.stat().st_mtime)
        for old in newest_first[_KEPT - 1 :]:
            shutil.rmtree(old, ignore_errors=True)


_keep_code_by_source()
