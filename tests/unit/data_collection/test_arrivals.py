import gzip
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from data_collection.workload.arrivals import Arrivals, arrival_times


def write_trace(path: Path, text: str) -> Arrivals:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return Arrivals(kind="trace", trace=str(path), scale=2.0)


def test_a_closed_loop_never_waits_for_an_arrival() -> None:
    assert list(islice(arrival_times(Arrivals()), 5)) == [0.0] * 5


def test_poisson_gaps_are_exponential_with_mean_one_over_rate() -> None:
    times = list(islice(arrival_times(Arrivals(kind="poisson", rate=4.0, seed=7)), 20_000))
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # of an exponential, mean = deviation


def test_the_seed_decides_the_arrivals() -> None:
    first, again, other = (
        list(islice(arrival_times(Arrivals(kind="poisson", seed=seed)), 10)) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_trace_starts_at_zero_and_is_scaled(tmp_path: Path, name: str) -> None:
    text = "arrival_s,input_tokens\n10.0,5\n11.0,6\n11.0,7\n14.0,8\n"
    arrivals = write_trace(tmp_path / name, text)
    assert list(arrival_times(arrivals)) == [0.0, 0.5, 0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s\n5\n4\n", r"trace\.csv:3: arrival 4\.0 comes before 5\.0"),
        ("time\n5\n", r"trace\.csv:2: needs a column 'arrival_s'.*'time': '5'"),
        ("arrival_s\nsoon\n", r"trace\.csv:2: needs a column 'arrival_s'.*'soon'"),
        ("arrival_s\n1\nnan\n", r"trace\.csv:3: needs a column 'arrival_s'.*'nan'"),
        ("arrival_s\n", r"trace\.csv: no arrivals found"),
        ("", r"trace\.csv: no arrivals found"),
    ],
)
def test_a_wrong_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    arrivals = write_trace(tmp_path / "trace.csv", text)
    with pytest.raises(ValueError, match=message):
        list(arrival_times(arrivals))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1, not 0"),
        ({"rate": 0.0}, "must be above 0"),
        ({"scale": -1.0}, "must be above 0"),
        ({"kind": "trace"}, "need the path of a trace"),
    ],
)
def test_impossible_arrivals_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrivals(**wrong)  # type: ignore[arg-type]
