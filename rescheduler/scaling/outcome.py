"""What a comparison of rules shows: a table, what its parts do, a figure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.table import Table

from rescheduler.scaling.days import MINUTE
from rescheduler.scaling.study import Arm, Found
from rescheduler.simulator.results.figures import COLOURS, create_panels, finish_axes
from rescheduler.simulator.results.metrics import half_interval

__all__ = [
    "DRAWN",
    "Contrast",
    "ShownDay",
    "contrast",
    "contrasts",
    "document",
    "draw_days",
    "label",
    "outcome_table",
    "sentences",
    "shown_day",
]

FloatArray = npt.NDArray[np.float64]

REACTIVE = "kv_usage"
"""The rule that others are compared with."""

DRAWN = ("kv_usage", "rate", "arrivals", "load_ahead+arrivals")
"""The rules that a figure shows."""

_PARTS = (
    ("the rate of arrivals instead of the load", "rate", "load"),
    ("a season of arrivals instead of the last minute's rate", "arrivals", "rate"),
    ("the load now beside the forecast of arrivals", "load+arrivals", "arrivals"),
    ("forecasts of lengths beside both", "load_ahead+arrivals", "load+arrivals"),
    ("knowing arrivals and lengths", "oracle", "load_ahead+arrivals"),
)


class Contrast(NamedTuple):
    """A paired difference between two arms over days.

    Attributes:
        hours: mean change of the replica-hours, in percent.
        hours_half: half its 95% interval by Student's t; NaN of one day.
        slo: mean change of the share of requests in time, in percentage points.
        slo_half: half its interval.
    """

    hours: float
    hours_half: float
    slo: float
    slo_half: float

    @property
    def text(self) -> str:
        """In words."""
        hours = _with_half(self.hours, self.hours_half, 1, "+")
        slo = _with_half(self.slo, self.slo_half, 2, "+")
        return f"GPU-hours {hours}%, in time {slo} points"


def contrast(one: Found, other: Found) -> Contrast:
    """Return what an arm changes, on the days that both have."""
    days = [seed for seed in one.days if seed in other.days]
    pairs = [(one.days[seed], other.days[seed]) for seed in days]
    hours = np.array([100 * (a["hours"] / b["hours"] - 1) for a, b in pairs])
    slo = np.array([100 * (a["slo"] - b["slo"]) for a, b in pairs])
    return Contrast(float(hours.mean()), _half(hours), float(slo.mean()), _half(slo))


def contrasts(found: Mapping[Arm, Found]) -> dict[str, Contrast]:
    """Return what each part does, of the arms that are there."""
    by_rule: dict[str, Found] = {}
    for arm, one in found.items():
        by_rule.setdefault(arm.rule, one)
    return {
        f"{text} ({rule} against {base})": contrast(by_rule[rule], by_rule[base])
        for text, rule, base in _PARTS
        if rule in by_rule and base in by_rule
    }


def label(arm: Arm) -> str:
    """Return what a table calls an arm."""
    return f"{arm.rule} ({arm.lengths})" if arm.rule.startswith("load_ahead") else arm.rule


def outcome_table(found: Mapping[Arm, Found], gpus: int, keep: float, title: str) -> Table:
    """Return the arms as rows.

    Args:
        found: the arms.
        gpus: of a replica.
        keep: share of the requests that are to be in time; rules that could not are marked.
        title: of the table.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    for head in ("target", "in time, %", "P99 TTFT, s", "GPU-hours", f"against {REACTIVE}"):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("replicas", "starts", "moved", "cut"):
        table.add_column(head, justify="right")
    base = next((one for arm, one in found.items() if arm.rule == REACTIVE), None)
    for arm, one in found.items():
        mean, half = _means(one)
        against = "" if base in (None, one) else _hours_against(one, base)
        missed = max(tried.slo for tried in one.tried) < keep
        table.add_row(
            label(arm) + (" *" if missed else ""),
            f"{one.target:.3g}",
            _with_half(100 * mean["slo"], 100 * half["slo"], 2),
            _with_half(mean["ttft_p99"], half["ttft_p99"], 2),
            _with_half(gpus * mean["hours"], gpus * half["hours"], 0),
            against,
            f"{mean['mean']:.1f}",
            f"{mean['starts']:.0f}",
            f"{mean['moved']:.0f}",
            f"{mean['cut']:.0f}",
        )
    return table


def sentences(found: Mapping[Arm, Found], keep: float) -> list[str]:
    """Return in words what the parts do, and which rules could not keep the objectives."""
    lines = [f"{text}: {one.text}" for text, one in contrasts(found).items()]
    missed = [label(arm) for arm, one in found.items() if max(t.slo for t in one.tried) < keep]
    if missed:
        lines.append(f"* no target kept {100 * keep:g}% in time in training: {', '.join(missed)}")
    return lines


def document(found: Mapping[Arm, Found], gpus: int) -> dict[str, Any]:
    """Return all figures, as JSON has them: those that are not finite as null."""
    return {
        "arms": {
            label(arm): {
                "target": one.target,
                "days": {str(seed): _finite(figures) for seed, figures in one.days.items()},
                "gpu_hours": gpus * float(np.mean([d["hours"] for d in one.days.values()])),
                "in_time": float(np.mean([d["slo"] for d in one.days.values()])),
                "training": [tried._asdict() for tried in one.tried],
            }
            for arm, one in found.items()
        },
        "parts": {text: _finite(one._asdict()) for text, one in contrasts(found).items()},
    }


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if np.isfinite(value) else None for name, value in figures.items()}


class ShownDay(NamedTuple):
    """Replicas over a day.

    Attributes:
        needed: [n_minutes] that each minute's arrivals need.
        paid: name of an arm -> [n_minutes] that start, serve or drain.
    """

    needed: FloatArray
    paid: dict[str, FloatArray]


def shown_day(found: Mapping[Arm, Found], needed: FloatArray, rules: Sequence[str]) -> ShownDay:
    """Return the first compared day of some rules, of those that are there.

    Args:
        found: the arms.
        needed: [n_minutes] replicas that each minute's arrivals need.
        rules: that are shown.
    """
    paid = {}
    minutes = MINUTE * np.arange(len(needed))
    for rule in rules:
        for arm, one in found.items():
            if arm.rule == rule and one.shown is not None:
                last = np.searchsorted(one.shown.time, minutes, "right") - 1
                paid[label(arm)] = one.shown.paid[last]
    return ShownDay(needed, paid)


def draw_days(panels: Mapping[str, ShownDay]) -> Any:
    """Return a figure of replicas over a day, a panel for each entry."""
    figure, axes = create_panels(len(panels), 2, (6.4, 3.0), sharey=False)
    for one, (title, day) in zip(axes, panels.items(), strict=True):
        hours = np.arange(len(day.needed)) * MINUTE / 3600
        one.fill_between(hours, day.needed, color="0.85", label="needed", linewidth=0)
        for k, (name, paid) in enumerate(day.paid.items()):
            colour = COLOURS[k % len(COLOURS)]
            one.step(hours, paid, where="post", color=colour, linewidth=0.9, label=name)
        one.set_xlim(0, hours[-1])
        one.set_ylim(bottom=0)
        one.set_title(title, loc="left", fontsize="small")
        one.legend(frameon=False, fontsize="x-small", ncols=2, loc="upper left")
        finish_axes(one)
    figure.supxlabel("hour", fontsize="medium")
    figure.supylabel("replicas: starting, serving, draining", fontsize="medium")
    return figure


def _means(one: Found) -> tuple[dict[str, float], dict[str, float]]:
    days = list(one.days.values())
    values = {name: np.array([day[name] for day in days]) for name in days[0]}
    with np.errstate(invalid="ignore"):  # a day's P99 is infinite if that many never began
        mean = {name: float(v.mean()) for name, v in values.items()}
        return mean, {name: _half(v) for name, v in values.items()}


def _half(values: FloatArray) -> float:
    return float(half_interval(values)) if len(values) > 1 else float("nan")


def _hours_against(one: Found, base: Found | None) -> str:
    assert base is not None, "there is one to compare with"
    found = contrast(one, base)
    return _with_half(found.hours, found.hours_half, 1, "+") + "%"


def _with_half(value: float, half: float, digits: int, sign: str = "") -> str:
    text = f"{value:{sign}.{digits}f}".replace("-", "−")
    return text if not half >= 0 else f"{text} ± {half:.{digits}f}"
