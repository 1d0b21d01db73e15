"""What a proxy counts of its peers' requests while no coordinator does."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.engine_states import engine_state
from rescheduler.coordination.cluster_loads import ClusterLoads
from rescheduler.coordination.messages import MOST, MOST_REQUESTS, Load
from rescheduler.engines.deployment import Instance, ProxyOptions
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements

LOST = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def loads(clock: Clock) -> tuple[ClusterLoads, InstanceState]:
    instance = InstanceState(Instance("decode-0", "decode", "http://a:1"), ProxyOptions(), None)
    own = Placements[LiveRequest]()
    return ClusterLoads(own, [instance], ProxyOptions(), LOST, clock), instance


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


STATE = engine_state()
LOADS = st.builds(
    lambda requests, tokens: Load([requests], [tokens]),
    st.integers(0, MOST_REQUESTS),
    st.integers(0, MOST),
)


@given(st.lists(LOADS, max_size=5), st.booleans())
def test_whatever_peers_say_a_proxy_is_left_its_share_of_an_instance(
    said: list[Load], known: bool
) -> None:
    counted, instance = loads(Clock())
    instance.engine = STATE if known else None
    counted.peers(dict(enumerate(said)))
    there, proxies = counted.on(instance), len(said) + 1
    requests = sum(load.requests[0] for load in said)
    tokens = sum(load.tokens[0] for load in said)
    assert len(there) <= 1024
    if known:
        assert len(there) == min(requests, STATE.max_num_seqs - STATE.max_num_seqs // proxies)
    held = sum(request.context_tokens for request in there)
    if there:
        assert held == min(tokens, instance.kv_capacity - instance.kv_capacity // proxies)


@given(
    st.lists(st.lists(st.integers(0, MOST_REQUESTS), min_size=3, max_size=3), min_size=1),
    st.integers(1, 8),
    st.integers(1, 40),
)
def test_whatever_peers_say_a_proxy_is_left_its_share_of_the_prefills(
    said: list[list[int]], concurrency: int, ahead: int
) -> None:
    options = ProxyOptions(prefill_concurrency=concurrency, ahead=ahead)
    named = [Instance(f"prefill-{i}", "prefill", f"http://a:{i}") for i in range(3)]
    instances = [InstanceState(one, options, None) for one in named]
    counted = ClusterLoads(Placements[LiveRequest](), instances, options, LOST, Clock())
    counted.peers({i: Load(requests, [0] * 3) for i, requests in enumerate(said)})
    there = [len(counted.on(instance)) for instance in instances]
    assert max(there) < concurrency
    assert sum(there) < ahead


def test_a_load_on_other_instances_is_left_out() -> None:
    counted, instance = loads(Clock())
    counted.peer(1, Load([1, 2], [3]))
    assert not counted.on(instance)
