"""The verdict of `headway advise` in plain words; every word of it follows from the figures."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rescheduler.simulator.advice.verdicts import (
    ORDER_LOAD,
    WORTH,
    Case,
    Gain,
    Judgement,
    OrderGains,
    Quality,
)
from rescheduler.simulator.results.report import COLOURS, finish_axes
from rescheduler.simulator.workloads.forecast_recording import MEASURED_INTERVAL

_WIDTH = 98
_FIGURES = {
    "throughput": "throughput",
    "latency": "mean latency",
    "goodput": "requests within the objectives",
}


def advice_text(
    about: Sequence[str],
    order: OrderGains | None,
    judgements: Sequence[Judgement],
    quality: Quality | None,
    sigma: float,
) -> str:
    """Return the verdict."""
    paragraphs = [" ".join(about)]
    if order is not None:
        paragraphs.append(_order(order))
    paragraphs += [_scenario(judgement) for judgement in judgements]
    if quality is not None:
        paragraphs.append(_quality(quality))
    paragraphs.append(_recommendation(judgements, sigma))
    return "\n".join(textwrap.fill(paragraph, _WIDTH) for paragraph in paragraphs)


def in_words(gain: Gain, figure: str) -> str:
    """Return a gain as the change of its figure: "−4.1% (±0.3)"."""
    change = -gain.mean if figure == "latency" else gain.mean
    decimals = 1 if abs(change) >= 0.001 or gain.half >= 0.001 else 2
    value = f"{change:+.{decimals}%}".replace("-", "−")
    if gain.seeds == 1:
        return f"{value} (one seed, no interval)"
    return f"{value} (±{100 * gain.half:.{decimals}f})"


_KNOWN = {
    "past_lengths": "with prompts and past lengths alone",
    "own_past": "with the past of each client and prefix",
    "real_forecasts": "with forecasts of real quality",
    "true_lengths": "with the true lengths",
}

_WITHOUT_MODEL = ("past_lengths", "own_past")


def _order(gains: OrderGains) -> str:
    said = ", ".join(
        f"{in_words(gains.latency[key], 'latency')} {known} "
        f"(P99 {in_words(gains.tail[key], 'latency')})"
        for key, known in _KNOWN.items()
        if key in gains.latency
    )
    clock = "behind the barrier" if gains.clock == "barrier" else "as independent replicas"
    paying = {
        None: "Serving in order of arrival is as good.",
        "past_lengths": "ORDER: {name: boost} pays, and needs no forecast.",
        "own_past": "ORDER: {name: boost} pays, and more by the past, which needs no model.",
        "real_forecasts": "ORDER: {name: boost} pays, and more with forecasts.",
    }[gains.pays]
    simpler = [gains.latency[key].pays for key in _WITHOUT_MODEL if key in gains.latency]
    if gains.pays == "real_forecasts" and not any(simpler):
        paying = "ORDER: {name: boost} pays with forecasts, and not without."
    if any(value.seeds == 1 for value in gains.latency.values()):
        paying = "One seed shows no interval, so no order is recommended."
    elif gains.pays is not None and -gains.tail[gains.pays].mean > gains.tail[gains.pays].half:
        paying += " The slowest requests become slower."
    return (
        f"Who goes first, {clock} at {ORDER_LOAD:.0%} of capacity: short requests first (boost) "
        f"instead of in order of arrival, mean latency {said}. {paying}"
    )


def _scenario(judgement: Judgement) -> str:
    figure, ahead = judgement.figure, judgement.ahead
    title = judgement.scenario.title
    sentences = [f"{title[0].upper()}{title[1:]}:"]
    if judgement.scenario.load is not None:
        queue = "nobody queues" if judgement.wait_p95 <= 2 * judgement.step else "requests queue"
        sentences.append(f"{queue} (95% wait less than {_seconds(judgement.wait_p95)});")
    truth = in_words(ahead["bfio_oracle"], figure)
    if not judgement.by_load.better and not any(value.better for value in ahead.values()):
        sentences.append(
            f"no router is measurably better than {judgement.today.title}; {_FIGURES[figure]} "
            f"{in_words(judgement.by_load, figure)} with balanced tokens, a further {truth} with "
            "the true lengths."
        )
        return " ".join(sentences)
    measured = "" if judgement.by_load.measurable else ", nothing that could be measured"
    sentences.append(
        f"balancing tokens ({judgement.loads.title}) instead of counting requests "
        f"({judgement.today.title}): {_FIGURES[figure]} {in_words(judgement.by_load, figure)}"
        f"{measured}. Looking ahead, against {judgement.blind.title}: "
        f"{in_words(ahead[judgement.ages.key], figure)} with Kaplan-Meier given age "
        f"({judgement.ages.policy}), {in_words(ahead['bfio_measured'], figure)} with forecasts of "
        f"real quality, {truth} with the true lengths: {_worth(judgement)}."
    )
    return " ".join(sentences)


def _worth(judgement: Judgement) -> str:
    ahead, least = judgement.ahead, f"{WORTH:.0%}"
    ages, real, truth = (ahead[key] for key in (judgement.ages.key, "bfio_measured", "bfio_oracle"))
    if judgement.choice.knows == "forecasts":
        return "a forecast pays"
    if judgement.choice.knows == "ages":
        return "Kaplan-Meier is enough"
    if truth.pays and not (ages.pays or real.pays):
        return "it would pay only if lengths were known better"
    if ages.better or real.better:
        return f"measurable, but less than {least}"
    if truth.measurable and not truth.better:
        return "even the truth does harm"
    if truth.better:
        return f"even the truth is worth less than {least}"
    return "no gain that could be measured"


def _quality(quality: Quality) -> str:
    gains = ", ".join(
        f"{title} {in_words(value, quality.figure)}"
        for title, value in quality.gains.items()
        if title != "real"
    )
    if quality.lasts is None:
        lasts = "not even the truth gains measurably"
    else:
        noisier = [float(t.split()[1]) for t in quality.gains if t.startswith("σ")]
        gone = [sigma for sigma in noisier if sigma > quality.lasts]
        lasts = f"a gain can be measured up to σ {quality.lasts:g}"
        lasts += f" and is gone at σ {gone[0]:g}" if gone else ", the worst that was tried"
    return (
        f"How good must a forecast be ({quality.scenario.key}; {_FIGURES[quality.figure]} over "
        f"{quality.blind.title}; σ is the spread of log error): {gains}. So {lasts}; real "
        f"forecasts are taken to have σ {quality.sigma:g}."
    )


_TOLD = {"ages": " with forecast kaplan_meier", "forecasts": " with a forecast"}


def _recommendation(judgements: Sequence[Judgement], sigma: float) -> str:
    chosen: dict[str, tuple[Case, list[str]]] = {}
    for judgement in judgements:
        case = judgement.choice
        chosen.setdefault(case.key, (case, []))[1].append(judgement.scenario.key)
    paying = [case for case, _ in chosen.values() if case.knows in ("ages", "forecasts")]
    if not paying:
        answer = "Forecasts do not pay off for routing here."
    elif any(case.knows == "forecasts" for case in paying):
        answer = "Forecasts pay off for routing here."
    else:
        answer = "Looking ahead pays here, and needs no model: Kaplan-Meier given age is enough."
    everywhere = len(chosen) == 1
    configure = "; ".join(
        f"{case.configured}{_TOLD.get(case.knows, '')} "
        f"{'in every case above' if everywhere else _where(where)}"
        for case, where in chosen.values()
    )
    if any(judgement.by_load.seeds == 1 for judgement in judgements):
        answer = "One seed shows no interval, so nothing is recommended beyond today's router."
    return (
        f"RECOMMENDATION: {answer} Configure {configure}. (A router is preferred to a simpler one "
        f"only if it is measurably better, by {WORTH:.0%} or more. Forecasts of real quality are "
        f"the true remaining length × exp({sigma:g} z), z normal and new every "
        f"{MEASURED_INTERVAL} tokens.)"
    )


def _where(keys: Sequence[str]) -> str:
    return f"for {' and '.join(f'[{key}]' for key in keys)}"


def _seconds(value: float) -> str:
    return f"{1e3 * value:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def draw_advice(
    gains: Mapping[str, Mapping[str, Gain]], cases: Sequence[Case], quality: Quality | None
) -> Any:
    """Return the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0 if quality else 6.0, 4.2), layout="constrained")
    panels = figure.subplots(1, 2 if quality else 1, squeeze=False)[0]
    shown = cases[1:]
    rows = np.arange(len(shown))
    for i, (scenario, by_case) in enumerate(gains.items()):
        offset = 0.16 * (i - (len(gains) - 1) / 2)
        mean, half = _percent([by_case[case.key] for case in shown])
        panels[0].errorbar(
            mean,
            rows + offset,
            xerr=half,
            fmt="o",
            color=COLOURS[i],
            markersize=4.5,
            capsize=2.5,
            label=scenario,
        )
    panels[0].axvline(0.0, color="0.5", linewidth=0.8)
    panels[0].set_yticks(rows, [case.title for case in shown])
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    panels[0].legend(frameon=False, fontsize="small")
    finish_axes(panels[0], f"gain over {cases[0].title}, %")
    if quality is not None:
        _draw_quality(panels[1], quality)
    return figure


def _draw_quality(axes: Any, quality: Quality) -> None:
    noisy = {float(t.split()[1]): g for t, g in quality.gains.items() if t.startswith("σ")}
    mean, half = _percent(list(noisy.values()))
    axes.errorbar(list(noisy), mean, yerr=half, fmt="o-", color=COLOURS[0], capsize=3)
    binned = {title: g for title, g in quality.gains.items() if title.endswith("bins")}
    last = max(noisy)
    for i, (title, value) in enumerate(binned.items()):
        at = last + 0.4 * (i + 1)
        m, h = _percent([value])
        axes.errorbar([at], m, yerr=h, fmt="s", color=COLOURS[2], capsize=3)
        axes.annotate(title, (at, m[0]), (0, 8), textcoords="offset points", ha="center", size=8)
    m, h = _percent([quality.gains["real"]])
    axes.errorbar([quality.sigma], m, yerr=h, fmt="D", color=COLOURS[1], capsize=3, label="real")
    axes.axhline(0.0, color="0.5", linewidth=0.8)
    axes.set_xticks(list(noisy), [f"{sigma:g}" for sigma in noisy], fontsize="small")
    axes.set_title(quality.scenario.key, loc="left", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")
    finish_axes(
        axes,
        "σ, spread of the forecasts' log error; right: STAR's bins",
        f"gain over {quality.blind.title}, %",
    )


def _percent(gains: Sequence[Gain]) -> tuple[list[float], list[float]]:
    half = np.nan_to_num([100 * value.half for value in gains])
    return [100 * value.mean for value in gains], half.tolist()
