"""What the measurement of fairness between clients makes of its runs."""

from itertools import product

import numpy as np
import pytest

from benchmarks import fairness_cost
from benchmarks.fairness_cost import CLIENTS, FAIRNESS, FIGURES, ORDERS, SentByClients, label_of
from rescheduler.simulator.workloads.trace import first_requests, timed_blocks
from rescheduler.simulator.workloads.trace_files import create_trace


def test_clients_send_the_requests_that_the_trace_has() -> None:
    trace = create_trace("geometric", requests=70_000)
    sent = SentByClients(trace, CLIENTS[1].shares)
    plain, block = (first_requests(one, np.random.default_rng(3), 70_000) for one in (trace, sent))
    np.testing.assert_array_equal(plain.output, block.output)
    assert not plain.client.any()
    found = np.bincount(block.client) / 70_000
    np.testing.assert_allclose(found, CLIENTS[1].shares, atol=0.01)
    first, second = (
        next(timed_blocks(one, np.random.default_rng(3), "poisson")) for one in (trace, sent)
    )
    np.testing.assert_array_equal(first.arrival, second.arrival)


def test_whoever_sends_less_than_an_even_share_is_light() -> None:
    zipf, flood = CLIENTS
    assert [share < 1 / 20 for share in zipf.shares] == [i >= zipf.light for i in range(20)]
    assert flood.shares[0] == pytest.approx(sum(flood.shares[flood.light :])) == 0.5
    assert all(sum(clients.shares) == pytest.approx(1) for clients in CLIENTS)


def test_changes_are_paired_by_seed_with_the_same_order() -> None:
    factor = {"fcfs": 1.0, "boost": 0.5}
    arms = {
        label_of(order, fairness): {
            seed: dict.fromkeys(FIGURES, base * factor[order] * (1 + fairness))
            for seed, base in enumerate((10.0, 1000.0))
        }
        for order, fairness in product(ORDERS, FAIRNESS)
    }
    found = fairness_cost.changes_of(arms)
    assert found["latency_fcfs_0.5"] == pytest.approx(50)
    assert found["light_boost_1"] == pytest.approx(100)
    assert found["latency_boost_0.5_over_fcfs"] == pytest.approx(-25)
    assert "| boost, 0.5 | +50 ± 0% |" in fairness_cost.table("made up", arms)
    summary = fairness_cost.summary("made up", {key: [value] for key, value in found.items()})
    assert "| boost, 0.5 over fcfs, 0 | -25 (-25 … -25)% |" in summary
