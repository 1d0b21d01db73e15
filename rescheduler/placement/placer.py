"""What the flow of a request asks of whoever places it."""

from collections.abc import Collection
from typing import Protocol

from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest

__all__ = ["Placer"]


class Placer(Protocol):
    """Places this process's requests: by its own policy, or as a coordinator decides."""

    @property
    def usable(self) -> Collection[InstanceState]:
        """Decode instances that new requests may go to."""

    @property
    def waiting(self) -> Collection[LiveRequest]:
        """Requests that wait for a decode instance, in order of arrival."""

    @property
    def waiting_for_prefill(self) -> int:
        """Requests that wait for a prefill instance."""

    @property
    def step_seconds(self) -> float:
        """Mean time between two tokens of a request, pauses left out."""

    def admit(self) -> None:
        """Refuse a new request when there is no room for it.

        Raises:
            RequestRefusedError: 503 if no decode instance is in service, 429 if too many wait.
        """

    async def take_prefill(self, request: LiveRequest) -> InstanceState | None:
        """Wait for a place on a prefill instance; None if none is in service.

        Raises:
            RequestRefusedError: 503, no place in time.
        """

    async def place(self, request: LiveRequest) -> InstanceState:
        """Wait for a place on a decode instance; the request is counted there then.

        Raises:
            RequestRefusedError: 503, none in time.
        """

    def wake(self) -> None:
        """Decide soon: a request came or went, or an instance did."""

    def step_took(self, seconds: float) -> None:
        """Note the time between two tokens of a request."""

    def has_another(self, request: LiveRequest) -> bool:
        """Return whether an instance is in service that has not failed or turned away a request."""

    def compile(self) -> None:
        """Decide once on a made-up cluster, so that no request waits for a compiler."""
