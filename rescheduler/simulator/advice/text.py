"""The verdict of `headway advise` in plain words; every word of it follows from the figures."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictor.forecasts.forecast_recording import MEASURED_INTERVAL
from rescheduler.simulator.advice.verdicts import (
    ORDER_LOAD,
    WORTH,
    Case,
    Frontier,
    Gain,
    Judgement,
    OrderGains,
    Quality,
    order_words,
)
from rescheduler.simulator.results.report import COLOURS, finish_axes

_WIDTH = 98
_FIGURES = {
    "throughput": "throughput",
    "latency": "mean latency",
    "goodput": "requests within the objectives",
}


def advice_text(
    about: Sequence[str],
    order: OrderGains | None,
    frontier: Frontier | None,
    judgements: Sequence[Judgement],
    quality: Quality | None,
    sigma: float,
) -> str:
    """Return the verdict."""
    paragraphs = [" ".join(about)]
    if order is not None:
        paragraphs.append(_order(order))
    if frontier is not None:
        paragraphs.append(_frontier(frontier))
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


def _frontier(frontier: Frontier) -> str:
    said = ", ".join(
        f"{_short(order)} {in_words(mean, 'latency')} (P99 {in_words(p99, 'latency')})"
        for order, mean, p99 in frontier.points
    )
    most = f"With a P99 at most {frontier.tail - 1:.0%} above that in order of arrival (--tail)"
    chosen = frontier.chosen
    advised = "no order gains" if chosen is None else f"ORDER: {order_words(chosen)} gains most"
    return (
        f"What the mean may cost the tail, {_KNOWN[frontier.knows]}: mean latency {said}. "
        f"{most}, {advised}."
    )


def _short(order: Mapping[str, Any]) -> str:
    return f"scale {order['scale']}" if "scale" in order else str(order["name"])


def _scenario(judgement: Judgement) -> str:
    figure, ahead = judgement.figure, judgement.ahead
    title = judgement.scenario.title
    sentences = [f"{title[0].upper()}{title[1:]}:"]
    if judgement.scenario.load is not None:
        wait = judgement.mean_of("wait_p95")
        queue = "nobody queues" if wait <= 2 * judgement.mean_of("tpot") else "requests queue"
        seconds = f"{1e3 * wait:,.0f} ms" if wait < 1 else f"{wait:,.1f} s"
        sentences.append(f"{queue} (95% wait less than {seconds});")
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
        f"{title} {in_words(value, quality.judgement.figure)}"
        for title, value in quality.gains.items()
        if title != "real"
    )
    if quality.lasts is None:
        lasts = "not even the truth gains measurably"
    else:
        gone = [sigma for sigma in quality.noisy if sigma > quality.lasts]
        lasts = f"a gain can be measured up to σ {quality.lasts:g}"
        lasts += f" and is gone at σ {gone[0]:g}" if gone else ", the worst that was tried"
    judgement = quality.judgement
    return (
        f"How good must a forecast be ({judgement.scenario.key}; {_FIGURES[judgement.figure]} over "
        f"{judgement.blind.title}; σ is the spread of log error): {gains}. So {lasts}; real "
        f"forecasts are taken to have σ {quality.sigma:g}."
    )


def _recommendation(judgements: Sequence[Judgement], sigma: float) -> str:
    chosen: dict[str, tuple[Case, list[str]]] = {}
    for judgement in judgements:
        case = judgement.choice
        chosen.setdefault(case.key, (case, []))[1].append(f"[{judgement.scenario.key}]")
    paying = [case for case, _ in chosen.values() if case.knows in ("ages", "forecasts")]
    if not paying:
        answer = "Forecasts do not pay off for routing here."
    elif any(case.knows == "forecasts" for case in paying):
        answer = "Forecasts pay off for routing here."
    else:
        answer = "Looking ahead pays here, and needs no model: Kaplan-Meier given age is enough."
    forecast = {"ages": " with forecast kaplan_meier", "forecasts": " with a forecast"}
    configure = "; ".join(
        f"{case.configured}{forecast.get(case.knows, '')} "
        + ("in every case above" if len(chosen) == 1 else f"for {' and '.join(keys)}")
        for case, keys in chosen.values()
    )
    if any(judgement.by_load.seeds == 1 for judgement in judgements):
        answer = "One seed shows no interval, so nothing is recommended beyond today's router."
    return (
        f"RECOMMENDATION: {answer} Configure {configure}. (A router is preferred to a simpler one "
        f"only if it is measurably better, by {WORTH:.0%} or more. Forecasts of real quality are "
        f"the true remaining length × exp({sigma:g} z), z normal and new every "
        f"{MEASURED_INTERVAL} tokens.)"
    )


def draw_advice(
    judged: Sequence[Judgement],
    cases: Sequence[Case],
    quality: Quality | None,
    frontier: Frontier | None,
) -> Any:
    """Return the figure."""
    from matplotlib.figure import Figure

    n_panels = 1 + (quality is not None) + (frontier is not None)
    figure = Figure(figsize=(1.0 + 5.0 * n_panels, 4.2), layout="constrained")
    panels = figure.subplots(1, n_panels, squeeze=False)[0]
    shown = cases[1:]
    rows = np.arange(len(shown))
    for i, judgement in enumerate(judged):
        offset = 0.16 * (i - (len(judged) - 1) / 2)
        mean, half = _percent([judgement.over_today[case.key] for case in shown])
        panels[0].errorbar(
            mean,
            rows + offset,
            xerr=half,
            fmt="o",
            color=COLOURS[i],
            markersize=4.5,
            capsize=2.5,
            label=judgement.scenario.key,
        )
    panels[0].axvline(0.0, color="0.5", linewidth=0.8)
    panels[0].set_yticks(rows, [case.title for case in shown])
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    panels[0].legend(frameon=False, fontsize="small")
    finish_axes(panels[0], f"gain over {cases[0].title}, %")
    if quality is not None:
        _draw_quality(panels[1], quality)
    if frontier is not None:
        _draw_frontier(panels[-1], frontier)
    return figure


def _draw_frontier(axes: Any, frontier: Frontier) -> None:
    mean, x_half = _percent([one.mean for one in frontier.points])
    tail, y_half = _percent([one.tail for one in frontier.points])
    x, y = [-value for value in mean], [-value for value in tail]
    axes.errorbar(x, y, xerr=x_half, yerr=y_half, fmt="o-", color=COLOURS[0], capsize=3)
    for one, *at in zip(frontier.points, x, y, strict=True):
        axes.annotate(_short(one.order), at, (6, 4), textcoords="offset points", size=8)
    axes.axhline(100 * (frontier.tail - 1), color="0.5", linewidth=0.8)
    axes.set_title(f"order of service, {_KNOWN[frontier.knows]}", loc="left", fontsize="medium")
    finish_axes(axes, "mean latency over order of arrival, %", "P99, %")


def _draw_quality(axes: Any, quality: Quality) -> None:
    noisy = quality.noisy
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
    axes.set_title(quality.judgement.scenario.key, loc="left", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")
    finish_axes(
        axes,
        "σ, spread of the forecasts' log error; right: STAR's bins",
        f"gain over {quality.judgement.blind.title}, %",
    )


def _percent(gains: Sequence[Gain]) -> tuple[list[float], list[float]]:
    half = np.nan_to_num([100 * value.half for value in gains])
    return [100 * value.mean for value in gains], half.tolist()
