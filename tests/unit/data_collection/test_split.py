import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_collection.dataset.dataset_schema import DatasetError, split_requests

groups = st.lists(st.integers(0, 40), min_size=20, max_size=120).filter(
    lambda numbers: len(set(numbers)) >= 10
)


@given(groups, st.integers(0, 1000))
def test_parts_cover_everything_and_share_no_client(numbers: list[int], seed: int) -> None:
    group = np.array(numbers)
    parts = split_requests(group, seed)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(len(group)))
    owners = [set(group[part]) for part in parts.values()]
    assert sum(map(len, owners)) == len(set(numbers))
    assert all(owners)
    assert all((np.diff(part) > 0).all() for part in parts.values())


@given(groups, st.integers(0, 1000))
def test_the_same_seed_gives_the_same_split(numbers: list[int], seed: int) -> None:
    once, again = (split_requests(np.array(numbers), seed) for _ in range(2))
    assert all(np.array_equal(once[name], again[name]) for name in once)


def test_another_seed_gives_another_split() -> None:
    group = np.arange(100)
    assert not np.array_equal(split_requests(group, 0)["test"], split_requests(group, 1)["test"])


def test_sizes_are_as_in_star() -> None:
    parts = split_requests(np.arange(1000), seed=0)
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 700,
        "validation": 150,
        "test": 150,
    }


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(DatasetError, match="2 requests are too few"):
        split_requests(np.array([0, 0, 0, 1]), seed=0)


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.5), (1.0, 0.0, 0.0), (1.2, -0.1, -0.1)])
def test_fractions_that_are_none_are_refused(fractions: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive and sum to 1"):
        split_requests(np.arange(100), seed=0, fractions=fractions)
