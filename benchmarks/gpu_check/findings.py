"""What a part of the check measures, and which of it is not as it must be."""

import math
from dataclasses import dataclass, field
from pathlib import Path


class NotRunError(Exception):
    """This machine lacks what a part needs; the message says what."""


@dataclass(frozen=True)
class Here:
    """Where a part runs: ``cuda`` or ``cpu``, with an empty folder of its own."""

    device: str
    folder: Path


@dataclass
class Findings:
    measured: dict[str, float | str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def note(self, **measured: float | str) -> None:
        self.measured |= measured

    def require_at_most(self, name: str, value: float, limit: float) -> None:
        """Keep a figure; it fails above the limit, or if it is not a number."""
        self._keep(name, value)
        if not value <= limit:
            self.failures.append(f"{name} is {value:.6g}, more than {limit:g}")

    def require_at_least(self, name: str, value: float, limit: float) -> None:
        """Keep a figure; it fails below the limit, or if it is not a number."""
        self._keep(name, value)
        if not value >= limit:
            self.failures.append(f"{name} is {value:.6g}, less than {limit:g}")

    def require(self, name: str, value: str, expected: str) -> None:
        """Keep a word; it fails if it is another."""
        self.measured[name] = value
        if value != expected:
            self.failures.append(f"{name} is {value!r} instead of {expected!r}")

    def _keep(self, name: str, value: float) -> None:
        self.measured[name] = value if math.isfinite(value) else str(value)  # as JSON can hold it
