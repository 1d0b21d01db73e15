"""Python's garbage collection at a time that suits the requests."""

import gc
import logging
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["GarbageCollection"]

logger = logging.getLogger("vllm.headway.batching")  # with vLLM's handler

_AMPLE = 3.0
"""Collections that must fit into the least slack."""

_PATIENCE_SECONDS = 10.0
_MOST_OBJECTS = 500_000
_REPORT_SECONDS = 60.0


class GarbageCollection:
    """Collects when no prefill waits, every decode has ample slack, and some time has passed.

    Left to itself Python stops the engine whenever enough objects have been made. Here automatic
    collection is off, what is there after warm-up is frozen, and never looked at again, and a
    collection takes place between two steps. If such a moment does not come, memory is bounded
    by collecting anyway.

    Source: Lyu et al. 2025, §4.

    Attributes:
        pauses: seconds of every collection since `start`.
        untimely: how many of them took place because too many objects had piled up.
    """

    def __init__(
        self, patience: float = _PATIENCE_SECONDS, most_objects: int = _MOST_OBJECTS
    ) -> None:
        """Set when to collect.

        Args:
            patience: least seconds between two collections.
            most_objects: objects made, less those freed, before one takes place in any case.
        """
        self.pauses: list[float] = []
        self.untimely = 0
        self._patience, self._most_objects = patience, most_objects
        self._began = self._collected = self._reported = time.monotonic()
        self._running = False

    def start(self) -> None:
        """Freeze what is there, and switch automatic collection off; only once."""
        if self._running:
            return
        self._running = True
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.callbacks.append(self._note)
        self._collected = time.monotonic()

    def between_steps(self, prefills_wait: bool, least_slack: float) -> None:
        """Collect if it is the time.

        Args:
            prefills_wait: whether a prompt waits to be computed.
            least_slack: seconds until the next token of any request is due.
        """
        crowded = gc.get_count()[0] > self._most_objects
        rested = time.monotonic() - self._collected > self._patience
        last = self.pauses[-1] if self.pauses else 0.0
        if crowded or (rested and not prefills_wait and least_slack > _AMPLE * last):
            self.untimely += crowded
            gc.collect()
            if self._collected - self._reported > _REPORT_SECONDS:
                self._tell()

    def stop(self) -> None:
        """Hand collection back to Python, and say how long the pauses were."""
        if not self._running:
            return
        self._running = False
        gc.callbacks.remove(self._note)
        gc.unfreeze()
        gc.enable()
        if self.pauses:
            self._tell()

    def _tell(self) -> None:
        self._reported = time.monotonic()
        logger.info(
            "garbage collection: %d pauses, %.1f ms in all, the longest %.1f ms; %d of them "
            "because too much had piled up",
            len(self.pauses),
            1e3 * sum(self.pauses),
            1e3 * max(self.pauses),
            self.untimely,
        )

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._began = now
        else:
            self.pauses.append(now - self._began)
            self._collected = now
