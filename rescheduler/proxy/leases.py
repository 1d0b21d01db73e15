"""The blocks of prefilled requests, kept for as long as these wait for a decode instance."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from data_collection.capture.requests import LEASE_SECONDS
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import MOST_RENEWED, ControlError

__all__ = ["Leases"]

logger = logging.getLogger("headway.serve")

_STOCK_SECONDS, _LONGEST_SECONDS = 30.0, 86_400.0
"""The lease of a prefill in stock vLLM, and what none is longer than."""
_MARGIN_SECONDS = 5.0
"""Before a lease ends, for which no engine reads."""
_RENEW_SECONDS, _LOOK_SECONDS = 5.0, 1.0
_UNTIL = "remote_blocks_expiry_time"
"""Of ``kv_transfer_params``: when the lease ends, on the clock of the engine that gave it."""


class Leases:
    """Renews the leases of prefilled requests that wait, every 5 s, over the control sockets.

    Otherwise an overload would feed itself: a decode instance computes a prompt again whose lease
    has ended in the line, just when there is least room for that.
    """

    def __init__(self, cluster: Cluster[LiveRequest]) -> None:
        self._cluster, self._timeout = cluster, cluster.deployment.proxy.control_seconds
        self._asked: dict[LiveRequest, float] = {}  # when, for those that wait
        self._failed: set[InstanceState] = set()

    @contextmanager
    def kept(self, request: LiveRequest) -> Iterator[None]:
        """Renew the lease of a request while the body runs, if it has been prefilled."""
        if request.prefill is None:
            yield
            return
        now = asyncio.get_running_loop().time()
        if request.lease_until is None:
            said = request.prefill.params.pop(LEASE_SECONDS, None)
            known = isinstance(said, int | float) and 0 <= said <= _LONGEST_SECONDS
            request.lease_until = now + (said if known else _STOCK_SECONDS) - _MARGIN_SECONDS
        self._asked[request] = now
        try:
            yield
        finally:
            del self._asked[request]

    def has_ended(self, request: LiveRequest) -> bool:
        """Return whether nobody can read the blocks of a prefilled request any more."""
        until = request.lease_until
        return until is not None and asyncio.get_running_loop().time() > until

    async def run(self) -> None:
        """Renew leases forever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                self._look()
            except Exception:  # the leases of all others are to be renewed, too
                logger.exception("looking for leases to renew failed")

    def _look(self) -> None:
        """Begin to renew what is due."""
        now, due = asyncio.get_running_loop().time(), dict[InstanceState, list[LiveRequest]]()
        for request, asked in self._asked.items():
            if now - asked >= _RENEW_SECONDS and request.prefill is not None:
                due.setdefault(request.prefill.kept.instance, []).append(request)
        for instance, requests in due.items():
            self._asked.update(dict.fromkeys(requests, now))
            if instance.control is not None:
                for i in range(0, len(requests), MOST_RENEWED):
                    some = requests[i : i + MOST_RENEWED]
                    self._cluster.background(self._renew(instance, instance.control, some))

    async def _renew(
        self, instance: InstanceState, control: ControlClient, requests: Sequence[LiveRequest]
    ) -> None:
        now = asyncio.get_running_loop().time()
        try:
            renewed = await control.renew([request.id for request in requests], self._timeout)
        except ControlError as error:  # of another version, perhaps: then its lease ends
            if instance not in self._failed:
                logger.warning("%s: no lease is renewed: %s", instance.name, error)
            self._failed.add(instance)
            return
        self._failed.discard(instance)
        kept = set(renewed.ids)
        for request in requests:
            prefill = request.prefill
            if request.id in kept and prefill is not None and prefill.kept.instance is instance:
                request.lease_until = now + renewed.seconds - _MARGIN_SECONDS
                if prefill.params.get(_UNTIL) is not None:
                    prefill.params[_UNTIL] = renewed.until
