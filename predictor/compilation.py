"""How the hot paths are compiled by numba, and where their machine code is kept."""

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from numba import config, njit

P = ParamSpec("P")
R = TypeVar("R")

_ROOT = Path(__file__).resolve().parents[1]
_KEPT = 8
"""Versions of a module whose machine code is kept."""
_NUMBA_LOCATORS = (
    *("UserProvidedCacheLocator", "InTreeCacheLocator", "UserWideCacheLocator"),
    *("IPythonCacheLocator", "ZipCacheLocator"),
)
_IMPORT = re.compile(
    r"^\s*(?:from|import)\s+((?:data_collection|predictor|rescheduler)[\w.]*)"
    r"(?:\s+import\s+(?:\(([^)]*)\)|([^\n]*)))?",
    re.MULTILINE,
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
    locator = SourceLocator(python, python.__code__.co_filename)
    name = f"{python.__module__.rpartition('.')[2]}.{python.__qualname__}"
    return any(Path(locator.get_cache_path()).glob(f"{name}-*.nbi"))


def _njit(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    made: Callable[P, R] = njit(cache=True, nogil=True, **options)(function)
    return made


class SourceLocator:
    """Keep machine code in the user's cache, by the sources that it was compiled from.

    numba looks at the path and the time of a function's own file: after an update it would go
    on using callees and constants of other files as they were, and in a fresh clone it would
    compile everything again. Here the key is the module's name and the contents of its file and
    of all files of this project that it imports, directly or not.
    """

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        file = Path(py_file).resolve()
        if file.is_relative_to(_ROOT):
            self._module = ".".join(file.relative_to(_ROOT).with_suffix("").parts)
        else:
            path = hashlib.sha256(str(file).encode()).hexdigest()[:16]
            self._module = f"{file.stem}-{path}"
        self._digest = _digest(file)
        self._line = py_func.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "SourceLocator | None":
        """Return a locator, or None for code that is not this project's and uses none of it."""
        file = Path(py_file).resolve()
        if not file.is_file() or not (file.is_relative_to(_ROOT) or any(_imported(file))):
            return None
        locator = cls(py_func, py_file)
        locator.ensure_cache_path()
        return locator

    def ensure_cache_path(self) -> None:
        """Create the folder and remove those of the oldest versions of the module."""
        folder = Path(self.get_cache_path())
        if folder.is_dir():
            return
        if folder.parent.is_dir():
            newest_first = sorted(folder.parent.iterdir(), key=lambda old: -old.stat().st_mtime)
            for old in newest_first[_KEPT - 1 :]:
                shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        """Return the folder of this version of the module."""
        return str(_root(config.CACHE_DIR) / self._module / self._digest[:16])

    def get_source_stamp(self) -> str:
        """Return what changes when the module or something it imports does."""
        return self._digest

    def get_disambiguator(self) -> str:
        """Return what distinguishes functions of one name."""
        return str(self._line)


@cache
def _root(chosen: str) -> Path:
    """Return the folder of all machine code: the user's, or one for this process alone.

    Never one of numba's own choice, which would be read again after a change elsewhere.
    """
    try:
        root = Path(chosen) if chosen else Path.home() / ".cache" / "headway" / "numba"
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    own = tempfile.mkdtemp(prefix="headway-numba-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


@cache
def _digest(file: Path) -> str:
    """Return the digest of a file and of the project's files that it imports, at any depth."""
    seen: set[Path] = set()
    ahead = [file]
    while ahead:
        source = ahead.pop()
        if source not in seen:
            seen.add(source)
            ahead += _imported(source)
    digest = hashlib.sha256()
    for source in sorted(seen - {file}):
        digest.update(str(source.relative_to(_ROOT)).encode() + b"\0" + source.read_bytes())
    digest.update(file.read_bytes())
    return digest.hexdigest()


def _imported(file: Path) -> Iterator[Path]:
    """Yield the project's files that a file names in its import statements."""
    for module, listed, rest in _IMPORT.findall(file.read_text(encoding="utf-8")):
        folder = _ROOT.joinpath(*module.split("."))
        names = re.findall(r"\w+", re.sub(r"#.*", "", listed or rest))
        modules = [folder, *(folder / name for name in names)]
        for module_file in (module.with_suffix(".py") for module in modules):
            if module_file.is_file():
                yield module_file
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"


if not config.CACHE_LOCATOR_CLASSES:
    config.CACHE_LOCATOR_CLASSES = ",".join((f"{__name__}.SourceLocator", *_NUMBA_LOCATORS))
