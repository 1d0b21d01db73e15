"""Experiments on emulated engines: rounds are rotated, and what is kept is not run again."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.support import experiment
from benchmarks.support.experiment import Experiment, Run


class MadeUp(Experiment):
    """Arms whose figures are known, on engines that do nothing."""

    name = "made_up"
    arms: ClassVar[dict[str, float]] = {"base": 1.0, "half": 0.5, "other": 2.0}
    base = "base"
    figures = ("latency", "goodput")
    counts = ("preemptions",)
    excess = 0.0

    def __init__(self, options: Namespace) -> None:
        super().__init__(options)
        self.log: list[Any] = []

    def engines_of(self, arm: str) -> bool:
        return arm == "other"

    def deployment(self, key: bool) -> Any:
        self.log.append(key)
        return key

    def settings(self, run: Run | None) -> dict[str, Any]:
        return {"requests": self.options.requests, "capacity": run and run.load * self.capacity}

    async def measure(self, deployment: Any) -> float:
        self.log.append("measured")
        return 10.0

    async def serve(self, deployment: Any, run: Run, salt: int) -> dict[str, float]:
        self.log.append((run, salt))
        value = self.arms[run.arm] * (1 + run.round)
        figures = dict.fromkeys(("latency", "goodput", "preemptions"), value)
        return figures | {"excess": self.excess, "changed": 1.0, "failed": 0.0}


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    @contextmanager
    def engines(deployment: Any, logs: Path) -> Iterator[None]:
        yield

    monkeypatch.setattr(experiment, "engines", engines)
    monkeypatch.chdir(tmp_path)
    options = {"requests": 9, "loads": [0.9], "rounds": 2, "out": tmp_path / "kept"}
    more = {"arms": list(MadeUp.arms), "report": False, "quick": False, "json": None}
    return MadeUp(Namespace(**options, **more))


def test_arms_run_in_rotated_rounds_on_engines_that_they_share(made_up: MadeUp) -> None:
    made_up.run_missing(list(MadeUp.arms), 2)
    runs = [entry[0] for entry in made_up.log if isinstance(entry, tuple)]
    assert [run.arm for run in runs] == ["base", "half", "other", "half", "base", "other"]
    assert [run.round for run in runs] == [0, 0, 0, 1, 1, 1]
    kinds = [entry for entry in made_up.log if not isinstance(entry, tuple)]
    assert kinds == [False, "measured", True, False, True], "the capacity is measured once"


def test_what_is_kept_with_the_same_settings_is_not_run_again(made_up: MadeUp) -> None:
    made_up.run_missing(["base", "half"], 1)
    again = MadeUp(made_up.options)
    again.run_missing(["base", "half"], 2)
    assert again.capacity == 10.0
    assert [entry[0].round for entry in again.log if isinstance(entry, tuple)] == [1, 1]
    again.log.clear()
    again.run_missing(["base", "half"], 2)
    assert not again.log, "no engine is started"
    made_up.options.requests = 10
    assert again.valid(Run(0.9, 0, "base")) is None


def test_a_run_whose_steps_took_too_long_is_repeated_and_not_reported(made_up: MadeUp) -> None:
    made_up.excess = 0.1
    made_up.run_missing(["base"], 1)
    runs = [entry for entry in made_up.log if isinstance(entry, tuple)]
    assert len(runs) == len({salt for _, salt in runs}) == 3
    assert made_up.results(0.9, ["base"]) == {"base": {}}


def test_changes_are_relative_to_the_base_and_gains_have_their_sign(
    made_up: MadeUp, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made_up.main({})
    assert "| half | 2 | -50 ± 0% | -50 ± 0% | 1 |" in capsys.readouterr().out
    figures = made_up.summary(found)
    assert figures["capacity"] == 10.0
    assert figures["90_latency_gain_half"] == pytest.approx(50.0)
    assert figures["90_goodput_gain_half"] == pytest.approx(-50.0)
    assert figures["90_rounds_other"] == 2.0
    assert figures["90_answers_changed"] == 6.0
