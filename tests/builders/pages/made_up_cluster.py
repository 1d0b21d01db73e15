"""A cluster that is made up: it looks like a proxy to whoever watches it, at any size."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from routing_views import view_of

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.page.expectations import foreseen
from rescheduler.page.snapshot import (
    UNKNOWN,
    About,
    Accuracy,
    Finishes,
    Instance,
    LengthErrors,
    LogWriter,
    MoveReport,
    Outlook,
    Phase,
    Requests,
    Snapshot,
)

_EDGES = np.array([0, 16, 32, 64, 128, 256, 512, 1024, 2048])
_TOKENS = 12
"""That every request generates between two snapshots."""


@dataclass
class _Request:
    number: int
    instance: int
    prompt: int
    length: int
    generated: int = 0


@dataclass
class _Seen:
    made: Snapshot

    def snapshot(self) -> Snapshot:
        return self.made


class MadeUpCluster:
    """Instances with requests that end and are replaced; now and then one moves.

    Between two snapshots so many seconds pass, and so many joules are used.
    """

    def __init__(
        self,
        instances: int,
        requests: int,
        kv_capacity: int,
        seconds: float = 0.5,
        seed: int = 0,
        accuracy: Accuracy | None = None,
        joules: float | None = None,
        finishes: Finishes | None = None,
        outlook: Outlook | None = None,
        length_errors: Sequence[LengthErrors] = (),
    ) -> None:
        self.about = About(
            source="proxy",
            title="smollm2",
            routing="jsq_load",
            migration="survival",
            seconds=seconds,
        )
        self.looks = 0
        self._accuracy, self._joules = accuracy, joules
        self._finishes, self._outlook = finishes, outlook
        self._length_errors = list(length_errors)
        self._random = random.Random(seed)
        self._n, self._kv_capacity = instances, kv_capacity
        self._next = 0
        self._moves: list[MoveReport] = []
        self._going: tuple[_Request, int] | None = None
        self._requests = [self._new(g) for g in range(instances) for _ in range(requests)]
        for one in self._requests:
            one.generated = self._random.randrange(one.length)

    def record(self, path: Path, snapshots: int = 3) -> Path:
        """Write a log of what follows."""
        with LogWriter(path, self.about) as log:
            for _ in range(snapshots):
                log.write(msgspec.json.encode(self.look().snapshot()))
        return path

    def look(self) -> _Seen:
        self.looks += 1
        return _Seen(self._snapshot())

    def _new(self, instance: int) -> _Request:
        self._next += 1
        long = self._random.random() < 0.45
        length = int(self._random.gauss(620, 120) if long else self._random.gauss(110, 40))
        return _Request(self._next, instance, self._random.randrange(20, 240), max(8, length))

    def _advance(self) -> None:
        for i, one in enumerate(self._requests):
            one.generated += _TOKENS
            if one.generated >= one.length:
                self._requests[i] = self._new(one.instance)
        if self._going is not None:
            one, target = self._going
            if one in self._requests:
                self._moves.append(self._report(one, target))
                one.instance = target
            self._going = None
        elif self._n > 1 and self.looks % 4 == 0:
            one = self._random.choice(self._requests)
            self._going = one, (one.instance + 1 + self._random.randrange(self._n - 1)) % self._n

    def _report(self, one: _Request, target: int) -> MoveReport:
        fails = self._random.random() < 0.25
        return MoveReport(
            time=0.5 * self.looks,
            number=one.number,
            name=self._name(one),
            source=f"decode-{one.instance}",
            target=f"decode-{target}",
            tokens=one.generated,
            reason="survival, gain 0.21",
            outcome="no_room" if fails else "moved",
            pause=None if fails else 0.018,
        )

    def _name(self, one: _Request) -> str:
        return f"{'story' if one.length > 300 else 'question'}-{one.number}"

    def _snapshot(self) -> Snapshot:
        self._advance()
        n = len(self._requests)
        where = np.array([one.instance for one in self._requests], dtype=np.int64)
        prompt = np.array([one.prompt for one in self._requests], dtype=np.int64)
        generated = np.array([one.generated for one in self._requests], dtype=np.int64)
        left = np.array([one.length - one.generated for one in self._requests])
        curves = np.exp(-((_EDGES[None, :] / (1.15 * left[:, None])) ** 3))
        view = view_of(
            [64] * self._n,
            where,
            prompt,
            kv_capacity=np.full(self._n, self._kv_capacity),
            generated_tokens=generated,
            forecast=SurvivalForecast.new(_EDGES, curves),
        )
        instances = [
            Instance(
                name=f"decode-{g}",
                role="decode",
                in_service=True,
                draining=False,
                slots=64,
                kv_capacity=self._kv_capacity,
                kv_tokens=0,
                step_seconds=0.04 + 0.001 * g,
            )
            for g in range(self._n)
        ]
        moving, target = self._going or (None, -1)
        phases = [
            Phase.MOVING
            if one is moving
            else Phase.DECODING
            if one.generated > 24
            else Phase.PLACED
            for one in self._requests
        ]
        snapshot = Snapshot(
            time=0.5 * self.looks,
            step_seconds=0.041,
            points=[],
            instances=instances,
            requests=Requests(
                number=[one.number for one in self._requests],
                name=[self._name(one) for one in self._requests],
                phase=[phase.value for phase in phases],
                instance=where.tolist(),
                target=[target if one is moving else -1 for one in self._requests],
                prompt=prompt.tolist(),
                generated=generated.tolist(),
                **dict.fromkeys(("low", "median", "high"), [UNKNOWN] * n),
            ),
            moves=self._moves[-20:],
            accuracy=self._accuracy,
            joules=None if self._joules is None else self._joules * self.looks,
            finishes=self._finishes,
            outlook=self._outlook,
            length_errors=self._length_errors,
        )
        return foreseen(snapshot, view, [one.name for one in instances])
