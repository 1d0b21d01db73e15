"""The exhaustive search that `benchmarks.lookahead` compares small pools with."""

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.support.clairvoyant import least_imbalance, reached_imbalance
from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.routing import create_policy


def chosen(view: ClusterView, **options: object) -> npt.NDArray[np.int64]:
    return create_policy("bfio", **options).assign(view).instance


def test_the_best_run_by_hand() -> None:
    assert least_imbalance(2, 1, ((10, 2), (12, 2))) == 4
    assert least_imbalance(2, 2, ((10, 2), (10, 2), (12, 2), (12, 2))) == 0
    # 30 beside 10 and then 9 alone; 10 beside 9 and then 30 alone would be 1 + 30.
    assert least_imbalance(2, 1, ((30, 1), (10, 1), (9, 1))) == 20 + 9
    assert least_imbalance(2, 1, ((30, 1), (10, 1), (9, 1), (29, 1))) == 2


@pytest.mark.parametrize("options", [{}, {"horizon": 0}, {"horizon": 5}])
def test_no_policy_is_below_the_least(options: dict[str, object]) -> None:
    generator = np.random.default_rng(5)
    for _ in range(8):
        prompts = generator.integers(1, 90, 6).tolist()
        outputs = generator.integers(1, 5, 6).tolist()
        pool = tuple(zip(prompts, outputs, strict=True))
        reached = reached_imbalance(2, 2, pool, lambda view: chosen(view, **options))
        assert reached >= least_imbalance(2, 2, pool)
