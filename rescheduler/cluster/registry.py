"""Dataclasses that a configuration names: policies, planners, forecasts, traces."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


_KINDS: dict[Any, tuple[type, str]] = {
    float: (Real, "a number"),
    int: (Integral, "a whole number"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
}
"""Of an option's type: what its value may be, and how that is called."""


class Registry(dict[str, type[T]], Generic[T]):
    """Dataclasses by name.

    Args:
        what: they are, for errors.
        kinds: name -> dataclass, of those known from the start.
    """

    def __init__(self, what: str, kinds: Mapping[str, type[T]] | None = None) -> None:
        super().__init__(kinds or {})
        self.what = what

    def register(self, name: str) -> Callable[[C], C]:
        """Return a decorator that adds a dataclass under a name, and sets its ``name``.

        Raises:
            ValueError: the name is taken.
        """

        def add(kind: C) -> C:
            if name in self:
                raise ValueError(f"there already is a {self.what} {name!r}")
            kind.name = name
            self[name] = kind
            return kind

        return add

    def create(self, name: str, options: dict[str, Any]) -> T:
        """Return the dataclass of that name, made with the given options.

        Raises:
            ValueError: no such name, no such option, one that is missing, or a value that the
                dataclass refuses.
        """
        if not isinstance(name, str) or name not in self:
            raise ValueError(
                f"no {self.what} {name!r}; known: {', '.join(sorted(self))}{_nearest(name, self)}"
            )
        takes = {field.name: field for field in fields(self[name]) if field.init}  # type: ignore[arg-type]
        for option in options:
            if option not in takes:
                listed = ", ".join(takes) if takes else "none"
                raise ValueError(
                    f"{name} has no option {option!r}; it takes: {listed}{_nearest(option, takes)}"
                )
        for option, field in takes.items():
            required = field.default is MISSING and field.default_factory is MISSING
            if required and option not in options:
                raise ValueError(f"{name} needs the option {option!r}")
            if option in options:
                _check_kind(f"{name}: {option}", field.type, options[option])
        return self[name](**options)


def _check_kind(what: str, wanted: Any, value: object) -> None:
    """Refuse a value of another kind, where an option is a number, a text, or true or false.

    Raises:
        ValueError: it is.
    """
    kinds = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    known = [kind for kind in kinds if kind is not NoneType]
    if any(kind not in _KINDS for kind in known) or (value is None and NoneType in kinds):
        return
    for kind in known:  # true and false are whole numbers to Python
        if isinstance(value, _KINDS[kind][0]) and isinstance(value, bool) == (kind is bool):
            return
    words = " or ".join(_KINDS[kind][1] for kind in known)
    raise ValueError(f"{what} must be {words}, not {value!r}")


def _nearest(given: str, known: Iterable[str]) -> str:
    near = get_close_matches(str(given), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


COUNT, POSITIVE, NOT_NEGATIVE = "[1, inf)", "(0, inf)", "[0, inf)"


@dataclass(frozen=True)
class Checked:
    """A dataclass whose numbers have ranges; a `Literal` field takes its own values alone.

    ``class Star(Checked, beta="[0, 1]")``: beta lies in that interval, or is None.

    Raises:
        ValueError: names the field, what it may be, and what it is.
    """

    _ranges: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **ranges: str) -> None:
        """Keep the ranges of the fields, those that are inherited too."""
        super().__init_subclass__()
        cls._ranges = {**cls._ranges, **ranges}

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for field in fields(self):
            known = get_args(field.type) if get_origin(field.type) is Literal else ()
            if known and (value := getattr(self, field.name)) not in known:
                listed = " or ".join(map(repr, known))
                if len(known) > 2:
                    listed = f"one of {', '.join(map(repr, known))}"
                raise ValueError(f"{self._section()}{field.name} is {listed}, not {value!r}")
        kinds = {field.name: field.type for field in fields(self)}
        for name, interval in self._ranges.items():
            value = getattr(self, name)
            _check_kind(f"{self._section()}{name}", kinds[name], value)
            if value is not None and not _lies_in(interval, value):
                words = _words(interval)
                raise ValueError(f"{self._section()}{name} must be {words}, not {value}")

    def _section(self) -> str:
        """Return what an error begins with."""
        return ""


def _lies_in(interval: str, value: float) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    return above and (value < high if interval[-1] == ")" else value <= high)


def _words(interval: str) -> str:
    low, high = interval[1:-1].split(", ")
    words = f"{'above' if interval[0] == '(' else 'at least'} {low}"
    if high != "inf":
        words += f" and {'below' if interval[-1] == ')' else 'at most'} {high}"
    return words
