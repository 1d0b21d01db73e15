"""What a proxy counts of its peers' requests while no coordinator does."""

from rescheduler.coordination.cluster_loads import ClusterLoads
from rescheduler.coordination.messages import Load
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placements import Placements

LOST = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def loads(clock: Clock) -> tuple[ClusterLoads, InstanceState]:
    instance = InstanceState(Instance("decode-0", "decode", "http://a:1"), ProxyOptions(), None)
    own = Placements[LiveRequest]()
    return ClusterLoads(own, [instance], LOST, clock), instance


def test_requests_of_peers_count_as_long_as_they_are_on_average() -> None:
    counted, instance = loads(Clock())
    counted.peers({1: Load([2], [300])})
    counted.peer(2, Load([1], [0]))
    assert [request.context_tokens for request in counted.on(instance)] == [100, 100, 100]


def test_a_peer_that_falls_silent_counts_no_more() -> None:
    clock = Clock()
    counted, instance = loads(clock)
    counted.peers({1: Load([2], [200]), 2: Load([3], [300])})
    clock.now = LOST
    counted.peer(2, Load([1], [100]))
    assert len(counted.on(instance)) == 3
    clock.now = LOST + 1
    assert len(counted.on(instance)) == 1
    clock.now = 2 * LOST + 1
    assert len(counted.on(instance)) == 0
