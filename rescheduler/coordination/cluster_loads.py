"""What the requests of all proxies hold on each instance, as far as this one knows."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rescheduler.coordination.messages import ProxyLoad
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Counted, PlacedRequests

__all__ = ["ClusterLoads"]


@dataclass(frozen=True)
class _Elsewhere:
    """A request of another proxy, as long as its requests there are on average."""

    prompt_tokens: int
    generated_tokens: int = 0
    external_id: str = ""
    max_tokens: int | None = None
    can_move: bool = False
    destination: InstanceState | None = None
    generating: bool = True
    generated_at_move: int | None = None

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens


class ClusterLoads:
    """The requests on each instance: this proxy's own, and as many as its peers have there.

    Args:
        own: this proxy's requests.
        instances: of the deployment, in its order.
        session: of this proxy.
        lost_seconds: after which a peer from which nothing comes is taken to be gone.
        clock: seconds.
    """

    def __init__(
        self,
        own: PlacedRequests[Counted],
        instances: Sequence[InstanceState],
        session: str,
        lost_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._own, self._instances, self._session = own, instances, session
        self._lost_seconds, self._clock = lost_seconds, clock
        self._peers: dict[str, ProxyLoad] = {}
        self._heard_at: dict[str, float] = {}
        self._elsewhere: dict[InstanceState, list[Counted]] = {}

    def own(self, listening: str) -> ProxyLoad:
        """Return what this proxy has, for its peers.

        Args:
            listening: endpoint at which they hear it.
        """
        held = [self._own.on(instance) for instance in self._instances]
        return ProxyLoad(
            self._session,
            listening,
            [len(requests) for requests in held],
            [sum(request.context_tokens for request in requests) for requests in held],
        )

    def peer(self, load: ProxyLoad) -> None:
        """Take over what a peer has now."""
        n = len(self._instances)
        if load.session != self._session and len(load.requests) == len(load.tokens) == n:
            self._peers[load.session] = load
            self._heard_at[load.session] = self._clock()
            self._elsewhere.clear()

    def peers(self, loads: Sequence[ProxyLoad]) -> None:
        """Take over what all peers have now: who is not among them is gone."""
        self._peers.clear()
        self._heard_at.clear()
        self._elsewhere.clear()
        for load in loads:
            self.peer(load)

    def on(self, instance: InstanceState) -> Collection[Counted]:
        """Return the requests on an instance."""
        self._forget_lost()
        if not self._elsewhere:
            self._elsewhere = dict(zip(self._instances, self._of_peers(), strict=True))
        return [*self._own.on(instance), *self._elsewhere[instance]]

    def _forget_lost(self) -> None:
        now = self._clock()
        for session in [s for s, at in self._heard_at.items() if now - at > self._lost_seconds]:
            del self._peers[session], self._heard_at[session]
            self._elsewhere.clear()

    def _of_peers(self) -> list[list[Counted]]:
        listed: list[list[Counted]] = []
        for g in range(len(self._instances)):
            requests = sum(load.requests[g] for load in self._peers.values())
            tokens = sum(load.tokens[g] for load in self._peers.values())
            listed.append([_Elsewhere(round(tokens / requests))] * requests if requests else [])
        return listed
