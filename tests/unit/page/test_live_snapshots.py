"""Snapshots of what was seen of a proxy: forecasts and loads beside what is."""

import numpy as np

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.page.live_snapshots import Look
from rescheduler.page.snapshot import UNKNOWN, Instance, Phase, Requests, Snapshot


def instance(name: str, role: str, kv_capacity: int, kv_tokens: int) -> Instance:
    return Instance(
        name=name,
        role="prefill" if role == "prefill" else "decode",
        in_service=True,
        draining=False,
        slots=8,
        kv_capacity=kv_capacity,
        kv_tokens=kv_tokens,
    )


def test_forecasts_and_loads_are_put_where_they_belong() -> None:
    """Two requests on the second decode instance, one waits, one is being prefilled."""
    running = SurvivalForecast.new([0, 10, 1000], [[1, 1, 0], [1, 0.5, 0]])
    view = ClusterView(
        slots=np.array([8, 8]),
        kv_capacity=np.array([int(UNLIMITED), 500]),
        queued=np.array([0, 0]),
        instance=np.array([1, 1]),
        prompt_tokens=np.array([100, 30]),
        generated_tokens=np.array([50, 20]),
        forecast=running,
        waiting_prompt_tokens=np.array([40]),
        waiting_generated_tokens=np.array([1]),
        waiting_forecast=SurvivalForecast.new([0, 100], [[1, 0]]),
        waited_steps=np.array([3]),
        step_seconds=0.04,
    )
    requests = Requests(
        number=[7, 8, 9, 10],
        name=["a", "b", "c", "d"],
        phase=[Phase.DECODING, Phase.PLACED, Phase.WAITING, Phase.PREFILLING],
        instance=[2, 2, UNKNOWN, 1],
        target=[UNKNOWN] * 4,
        prompt=[100, 30, 40, 60],
        generated=[50, 20, 1, 0],
        low=[UNKNOWN] * 4,
        median=[UNKNOWN] * 4,
        high=[UNKNOWN] * 4,
    )
    instances = [
        instance("decode-0", "decode", UNKNOWN, 0),
        instance("prefill-0", "prefill", UNKNOWN, 60),
        instance("decode-1", "decode", 500, 0),
    ]
    unforeseen = Snapshot(
        time=12.5,
        step_seconds=0.04,
        points=[],
        instances=instances,
        requests=requests,
        further_waiting=2,
    )
    seen = Look(view, ["decode-0", "decode-1"], unforeseen).snapshot()
    assert (seen.time, seen.step_seconds, seen.further_waiting) == (12.5, 0.04, 2)
    assert seen.requests.low == [109, 2, 10, UNKNOWN]
    assert seen.requests.median == [505, 10, 50, UNKNOWN]
    assert seen.requests.high == [901, 802, 90, UNKNOWN]
    assert seen.requests.name == ["a", "b", "c", "d"]
    first, prefill, second = seen.instances
    assert (first.kv_tokens, prefill.kv_tokens, second.kv_tokens) == (0, 60, 200)
    assert prefill.ahead == []
    assert set(first.ahead) == {0}
    assert first.overflow == [], "its capacity is not known"
    assert second.ahead[0] == 200
    assert len(second.overflow) == len(seen.points)
    assert seen.points[-1] == 1024
