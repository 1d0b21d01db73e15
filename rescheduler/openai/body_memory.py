"""The memory of request bodies: counted as they arrive, until their requests end."""

from collections.abc import Iterator
from contextlib import contextmanager

from rescheduler.openai.fair_shares import FairShares
from rescheduler.openai.openai_request import RequestRefusedError

__all__ = ["BodyMemory", "KeptBody"]


class KeptBody:
    """A body of which more and more arrives.

    Args:
        shares: of all bodies, in bytes.
        client: whose it is.
        largest: bytes that it may have.
    """

    def __init__(self, shares: FairShares, client: str, largest: int) -> None:
        self._shares, self._client, self._largest = shares, client, largest
        self._size = 0

    def grow(self, more: int) -> None:
        """Count bytes that have arrived.

        Raises:
            RequestRefusedError: 413, it is too large; 503, all of them together are.
        """
        self.be(self._size + more)

    def be(self, size: int) -> None:
        """Count as many bytes as there are.

        Raises:
            RequestRefusedError: 413, it is too large; 503, all of them together are.
        """
        if size > self._largest:
            raise RequestRefusedError(413, f"the body is larger than {self._largest >> 20} MiB")
        if not self._shares.take(self._client, size - self._size):
            raise RequestRefusedError(
                503, "too many large requests are being served; try again later", retry_after=1
            )
        self._size = size


class BodyMemory:
    """The bodies of all requests that are being served, which are kept to resume them.

    What a client announces and does not send takes nothing from others.

    Args:
        largest_mb: of a body, in MiB.
        most_mb: of all bodies, in MiB.
        share: of that, which the bodies of one client may have; never less than the largest body.
    """

    def __init__(self, largest_mb: int, most_mb: int, share: float) -> None:
        most = most_mb << 20
        self._largest = largest_mb << 20
        self._shares = FairShares(most, max(int(share * most), self._largest))

    @property
    def held(self) -> int:
        """Bytes that are kept now."""
        return self._shares.held

    @contextmanager
    def kept(self, client: str, announced: int | None) -> Iterator[KeptBody]:
        """Count a body until its request ends.

        Args:
            client: whose it is, see `client_of`.
            announced: bytes that it is said to have; None: nothing is said.

        Raises:
            RequestRefusedError: 413, it is said to be too large.
        """
        body = KeptBody(self._shares, client, self._largest)
        try:
            if announced is not None and announced > self._largest:
                body.be(announced)
            yield body
        finally:
            body.be(0)
