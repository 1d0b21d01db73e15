"""What the requests of all proxies hold on each instance, as far as this one knows."""

from collections.abc import Callable, Collection, Mapping, Sequence

from rescheduler.coordination.messages import MOST, MOST_REQUESTS, Load
from rescheduler.engines.deployment import ProxyOptions
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Counted, PlacedRequests

__all__ = ["ClusterLoads"]

_MOST_ELSEWHERE = 1_024  # on an instance whose slots are not known


class ClusterLoads:
    """The requests on each instance: this proxy's own, and what its peers have there.

    Peers are believed in so far as this proxy is left its share: of P proxies, the others fill at
    most (P - 1)/P of an instance's slots and of its KV cache, whatever they say. Of a prefill
    instance the slots are the prefills that the options allow. So no peer can keep this proxy from
    placing requests, and what peers say costs as much time as slots at most.

    Args:
        lost_seconds: after which a peer from which nothing comes is taken to be gone.
    """

    def __init__(
        self,
        own: PlacedRequests[Counted],
        instances: Sequence[InstanceState],
        options: ProxyOptions,
        lost_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._own, self._instances = own, instances
        prefills = sum(one.instance.role == "prefill" for one in instances)
        # So many on each prefill instance that all together leave room for others, too.
        each = options.ahead // max(1, prefills)
        self._prefills_at_a_time = min(options.prefill_concurrency, max(1, each))
        self._lost_seconds, self._clock = lost_seconds, clock
        self._peers: dict[int, Load] = {}
        self._heard_at: dict[int, float] = {}
        self._elsewhere: dict[InstanceState, Sequence[Counted]] = {}

    def own(self) -> Load:
        """Return what this proxy has, for its peers."""
        held = [self._own.on(instance) for instance in self._instances]
        return Load(
            [min(len(requests), MOST_REQUESTS) for requests in held],
            [min(sum(one.context_tokens for one in requests), MOST) for requests in held],
        )

    def fits(self, load: Load) -> bool:
        """Return whether a load is one on these instances."""
        return len(load.requests) == len(load.tokens) == len(self._instances)

    def peer(self, proxy: int, load: Load) -> None:
        """Take over what a peer has now; a load that does not fit is left out."""
        if self.fits(load):
            self._peers[proxy] = load
            self._heard_at[proxy] = self._clock()
            self._elsewhere.clear()

    def peers(self, loads: Mapping[int, Load]) -> None:
        """Take over what all peers have now, by number: who is not among them is gone."""
        self._peers.clear()
        self._heard_at.clear()
        self._elsewhere.clear()
        for proxy, load in loads.items():
            self.peer(proxy, load)

    def on(self, instance: InstanceState) -> Collection[Counted]:
        """Return the requests on an instance."""
        self._forget_lost()
        if instance not in self._elsewhere:
            self._elsewhere[instance] = self._of_peers(instance)
        return [*self._own.on(instance), *self._elsewhere[instance]]

    def _forget_lost(self) -> None:
        now = self._clock()
        for proxy in [p for p, at in self._heard_at.items() if now - at > self._lost_seconds]:
            del self._peers[proxy], self._heard_at[proxy]
            self._elsewhere.clear()

    def _of_peers(self, instance: InstanceState) -> Sequence[Counted]:
        """Return as many requests as peers have on an instance, with as many tokens in all."""
        g, proxies = self._instances.index(instance), len(self._peers) + 1
        if instance.instance.role == "prefill":
            slots = self._prefills_at_a_time
        else:
            slots = instance.slots if instance.engine else proxies * _MOST_ELSEWHERE
        n = min(
            sum(load.requests[g] for load in self._peers.values()),
            slots - _share(slots, proxies),
            _MOST_ELSEWHERE,
        )
        if n <= 0:
            return []
        tokens = min(
            sum(load.tokens[g] for load in self._peers.values()),
            instance.kv_capacity - _share(instance.kv_capacity, proxies),
        )
        mean, longer = divmod(max(0, tokens), n)
        return [_elsewhere(mean + 1)] * longer + [_elsewhere(mean)] * (n - longer)


def _share(whole: int, proxies: int) -> int:
    """Return what is left to one of several proxies, at least 1."""
    return max(1, whole // proxies)


def _elsewhere(tokens: int) -> Counted:
    """Return some of what other proxies have on an instance: a slot, and tokens."""
    return Counted("", tokens, generating=True)
