"""The wall clock is set by hours, back and forward, while requests run."""

import asyncio
import logging
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from collector import http_collector
from made_up_cluster import MadeUpCluster
from scripted_cluster import cluster, until
from tokenizers import Tokenizer

from rescheduler.engines.proxy_options import TraceOptions
from rescheduler.page.snapshot import LogWriter, read_log, recording

HOURS = (-5, 7, 0, -24, 2)
TOKENS = 60


class WallClock:
    """The wall clock of this process, which can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        real, real_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: real() + self.ahead)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + round(self.ahead * 1e9))

    def set(self, hours: float) -> None:
        self.ahead = 3600.0 * hours


async def test_requests_moves_traces_and_the_log_go_on(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    clock, path = WallClock(monkeypatch), tmp_path / "log.gz"
    with http_collector() as collector:
        traces = TraceOptions(endpoint=collector.endpoint, sample=1.0)
        async with cluster(tokenizer, prefix_caching=False, traces=traces) as it:
            async with recording(it.listeners.feed, path):
                moves: list[asyncio.Task[str]] = []

                async def at(tokens: int) -> None:
                    hours = HOURS[max(0, len(moves) - (tokens > 20))]
                    if tokens in (10, 30):
                        clock.set(hours if tokens == 10 else -hours)
                    if tokens == 20:
                        moves.append(asyncio.create_task(it.move()))

                for _ in HOURS:
                    await it.answered(TOKENS, at)
                assert await asyncio.gather(*moves) == ["moved"] * len(HOURS)
                await until(lambda: path.stat().st_size > 2000)
            text = it.proxy.metrics.text().decode()
            assert f'{{outcome="ok",path="/v1/completions"}} {len(HOURS)}.0' in text
            for name in ("time_to_first_token", "inter_token_latency", "migration_gap"):
                (line,) = (one for one in text.splitlines() if f"{name}_seconds_sum" in one)
                assert 0 < float(line.split()[1]) < 600, line
            assert it.in_service
        collector.until(
            lambda spans: sum(span.name == "request" for span in spans) == len(HOURS),
            "the spans of all requests",
        )
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert read_log(path).times[-1] < 600 + 3600 * sum(map(abs, HOURS)) * 2


def test_a_log_goes_on_when_the_clock_is_set_back(tmp_path: Path) -> None:
    source, path = MadeUpCluster(2, 3, 4096), tmp_path / "log.gz"
    snapshot = source.look().snapshot()
    at = [0.0, 0.5, 1.0, -3600.0, -3599.5, -3599.0, -3598.5]
    with LogWriter(path, source.about) as writer:
        for seconds in at:
            later = msgspec.structs.replace(snapshot, time=1e9 + seconds)
            writer.write(msgspec.json.encode(later))
    times = read_log(path).times
    assert times == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.5])
    assert all(a <= b for a, b in pairwise(times))
