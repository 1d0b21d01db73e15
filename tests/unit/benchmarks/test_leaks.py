"""A twentieth of what `benchmarks.leaks` does."""

import numpy as np
import pytest

from benchmarks.leaks import KINDS, OUTCOMES, measure, slope

REQUESTS = 5000
MOST_KB = {"proxy": 1200.0, "coordinator": 750.0}
"""By which memory may grow in 1,000 requests, while what is kept on purpose is not yet complete.

The proxy's part of a request is 2.1 kB of Python objects before its task, trace and HTTP are
counted; the coordinator's is 0.8 kB, besides less than 0.5 kB for the names that it does keep, of
the latest. Of the first 3,750 requests nothing counts: by then what start-up left is collected.
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_leaks_in_a_short_run(smollm2: object) -> None:
    del smollm2  # is prepared
    figures, unexpected = await measure(REQUESTS, quiet=True)
    assert not unexpected
    assert figures["requests"] == REQUESTS
    assert sum(figures[f"requests_{name}"] for name in OUTCOMES) == REQUESTS
    for name in {outcome for kind in KINDS.values() for outcome in kind.expected}:
        assert figures[f"requests_{name}"] > 0, name
    assert figures["moves"] > 0
    for process, most in MOST_KB.items():
        for held in ("descriptors", "threads", "tasks", "series"):
            assert figures[f"{process}_{held}"] == 0, f"{process}: {held}"
        assert figures[f"{process}_rss_slope_kb_per_1000_low"] < most


def test_the_slope_is_that_of_what_leaks() -> None:
    generator = np.random.default_rng(0)
    requests = np.arange(0, 100_000, 250)
    noise = generator.normal(0.0, 100.0, len(requests))
    given_back = np.where(requests > 60_000, -12_000.0, 0.0)
    growth, low, high = slope(requests, 250_000 + 0.5 * requests + noise + given_back)
    assert low < 500.0 < high
    assert abs(growth - 500.0) < 10.0
    growth, low, high = slope(requests, 250_000 + noise + given_back)
    assert low < 0.0 < high
    assert abs(growth) < 10.0
