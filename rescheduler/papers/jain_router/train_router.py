"""`headway papers train-router`: train routers, and measure them beside other policies."""

import hashlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.papers.jain_router.agent import AgentConfig
from rescheduler.papers.jain_router.environment import RouterConfig
from rescheduler.papers.jain_router.training import (
    VARIANTS,
    Job,
    Trained,
    TrainingConfig,
    Variant,
    train_all,
)
from rescheduler.routing import LearnedRouter, RoutingPolicy, create_policy
from rescheduler.simulator.config.simulation_config import SimulationConfig, checked
from rescheduler.simulator.experiments.workers import changed_config, compile_notice, progress_bar
from rescheduler.simulator.results.metrics import (
    RequestRecords,
    RunResult,
    Summary,
    run_metrics,
    summarise,
    time_per_output_token,
)
from rescheduler.simulator.results.report import (
    COLOURS,
    Column,
    about,
    create_panels,
    figure_cell,
    finish_axes,
    markdown_table,
    refuse_foreign_folder,
    running_mean,
    write_study,
)
from rescheduler.simulator.simulation import run, run_setup
from rescheduler.simulator.workloads.trace_files import announce_traces

FloatArray = npt.NDArray[np.float64]

_COLUMNS = (
    Column("end to end, s", "end_to_end", 1.0, ".1f"),
    Column("request latency, s", "latency", 1.0, ".2f"),
    Column("TTFT, s", "ttft", 1.0, ".2f"),
    Column("TBT, ms", "tbt", 1e3, ".1f"),
    Column("at the router, s", "router_wait", 1.0, ".2f"),
    Column("at the instance, s", "instance_wait", 1.0, ".2f"),
    Column("preemptions", "preemptions", 1.0, ".0f"),
)

_LABELS: dict[Variant, str] = {variant: f"rl {variant}" for variant in VARIANTS}
"""What tables call the routers that are trained with a reward."""


class Competitor(NamedTuple):
    """A policy that is compared in a study.

    Attributes:
        label: of the table's row.
        policies: one, or one for each training of the same router, whose figures are averaged.
        pooled: requests wait at the router until an instance has a place for them; else they
            queue at their instance.
    """

    label: str
    policies: Sequence[RoutingPolicy]
    pooled: bool


class CaseFigures(NamedTuple):
    """One case of a study, by label.

    Attributes:
        summaries: means over the episodes with their intervals.
        gains: by how much less than with the first competitor the mean latency of a request, and
            the time until all requests were served, was, as shares of its means: the mean over
            episodes and half of its 95% interval.
        first: the requests of the first episode.
    """

    summaries: dict[str, Summary]
    gains: dict[str, dict[str, tuple[float, float]]]
    first: dict[str, RequestRecords]


def competitors(
    config: SimulationConfig, checkpoints: Mapping[str, Sequence[str]], pooled: Sequence[str]
) -> list[Competitor]:
    """Return the configured policies, and by label routers in folders that were trained before.

    Raises:
        ValueError: a policy or checkpoint that does not exist, or an unknown label in ``pooled``.
    """
    found: list[tuple[str, list[RoutingPolicy]]] = []
    for choice in config.policy_choices():
        options = {"name": choice.name} | choice.options
        found.append((choice.label, [checked(f"policies.{choice.label}", create_policy, options)]))
    for label, folders in checkpoints.items():
        if not folders:
            raise ValueError(f"checkpoints.{label}: at least one folder")
        found.append((label, [LearnedRouter(folder) for folder in folders]))
    _refuse_unknown("pooled", pooled, [label for label, _ in found])
    return [Competitor(label, policies, label in pooled) for label, policies in found]


def _refuse_unknown(key: str, labels: Iterable[str], known: Sequence[str]) -> None:
    for label in labels:
        if label not in known:
            raise ValueError(f"{key}: unknown label {label!r}; known: {', '.join(known)}")


def _refuse_study(
    learned_in: Mapping[str, SimulationConfig],
    cases: Mapping[str, SimulationConfig],
    taking_part: Sequence[Competitor],
    to_be_trained: Sequence[str],
    published: Mapping[str, float],
) -> None:
    """Check before hours of training what would fail, or be overlooked, after them.

    ``learned_in`` and ``cases`` are by title, the former as configured without one.
    """
    labels = [*(each.label for each in taking_part), *to_be_trained]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"duplicate label {label!r}; rename one of the two")
    _refuse_unknown("published", published, labels)
    for title, config in learned_in.items():
        _refuse_setting(config, f"train_on.{title}: " if title else "")
    config = next(iter(learned_in.values()))
    for title, case in cases.items():
        _refuse_setting(case, f"cases.{title}: ")
        instances, trained_for = case.cluster.instances, config.cluster.instances
        if to_be_trained and instances != trained_for:
            raise ValueError(f"cases.{title}: routers are trained for {trained_for} instances")
        if case.policy_choices() != config.policy_choices():
            raise ValueError(f"cases.{title}: policies are the same in all cases")
        for policy in (policy for each in taking_part for policy in each.policies):
            policy.refuse_other_cluster(instances)


def _refuse_setting(config: SimulationConfig, prefix: str) -> None:
    """Refuse settings with which an episode does not end when all requests are served."""
    if config.dispatch != "instant":
        raise ValueError(
            f"{prefix}dispatch: instant, for routers may send a request anywhere; name in `pooled` "
            "the policies whose requests are to wait"
        )
    for name in ("max_steps", "max_seconds"):
        if getattr(config, name) is not None:
            raise ValueError(f"{prefix}{name}: an episode ends when all requests are served")
    if config.admission.pab:
        raise ValueError(f"{prefix}admission.pab: routers do not learn what is turned away")
    if any(choice.name != "none" for choice in config.planner_choices()):
        raise ValueError(f"{prefix}migration.planners: routers do not learn what is moved")


def _episode_figures(result: RunResult) -> dict[str, float]:
    """Return what the paper reports of an episode; times in seconds.

    ``end_to_end`` is the time until all requests were served (its "end-to-end latency for servicing
    all requests"), ``tbt`` the mean time between tokens, ``router_wait`` and ``instance_wait`` the
    means of waiting in the router's queue and in the instance's, until first started.
    """
    requests, metrics = result.requests, run_metrics(result)
    return {
        "end_to_end": result.seconds,
        "latency": metrics["latency"],
        "ttft": metrics["ttft"],
        "tbt": metrics["itl"],
        "tbt_p99": metrics["itl_p99"],
        "router_wait": float((requests.placed - requests.arrival).mean()),
        "instance_wait": float((requests.start - requests.placed).mean()),
        "preemptions": float(result.preemptions),
        "throughput": metrics["throughput"],
    }


def play(config: SimulationConfig, taking_part: Sequence[Competitor], title: str) -> CaseFigures:
    """Have all competitors route the same episodes, one for each of the configured seeds.

    The first is what others are compared with; ``title`` is of the case, for the progress bar.

    Raises:
        ValueError, RuntimeError: as `run`.
    """
    setups = {
        pooled: run_setup(replace(config, dispatch="pool" if pooled else "instant"))
        for pooled in {each.pooled for each in taking_part}
    }
    figures: dict[str, list[dict[str, float]]] = {each.label: [] for each in taking_part}
    first: dict[str, RequestRecords] = {}
    with progress_bar() as bar:
        task = bar.add_task("", total=config.seeds * len(taking_part))
        for seed in range(config.seeds):
            for label, policies, pooled in taking_part:
                bar.update(task, description=f"{title}: {label}, episode {seed + 1}")
                results = [run(setups[pooled], policy, seed, label) for policy in policies]
                figures[label].append(summarise([_episode_figures(each) for each in results]).mean)
                first.setdefault(label, results[0].requests)
                bar.advance(task)
    base = figures[taking_part[0].label]
    gains: dict[str, dict[str, tuple[float, float]]] = {}
    for label, runs in figures.items():
        for name in ("latency", "end_to_end"):
            before, after = (np.array([each[name] for each in of]) for of in (base, runs))
            saved = summarise([{name: share} for share in (before - after) / before.mean()])
            gains.setdefault(label, {})[name] = saved.mean[name], saved.ci95.get(name, 0.0)
    return CaseFigures({label: summarise(runs) for label, runs in figures.items()}, gains, first)


def study_table(cases: Mapping[str, CaseFigures], published: Mapping[str, float]) -> list[str]:
    """Return the figures of all cases by title, as Markdown.

    ``published`` has, by label, the paper's improvement over round robin in percent.
    """
    heads = ["policy", *(column.title for column in _COLUMNS), "latency gain", "gain", "paper"]
    lines = []
    for title, case in cases.items():
        rows = []
        for label, summary in case.summaries.items():
            gains = [
                f"{gain:.1%} ± {half:.1%}" if summary.runs > 1 else f"{gain:.1%}"
                for gain, half in case.gains[label].values()
            ]
            paper = f"{published[label]:.2f}%" if label in published else ""
            shown = (figure_cell(summary, column) for column in _COLUMNS)
            rows.append([label, *shown, *gains, paper])
        lines += [f"## {title}", "", *markdown_table(heads, rows), ""]
    return lines


def draw_episode(case: CaseFigures) -> Any:
    """Return four panels: end-to-end time, TTFT by arrival, TBT, and queues at the instances.

    The first has means over all episodes with their intervals, the others the first episode.
    """
    figure, panels = create_panels(4, 2, (6.5, 4.0), sharex=False, sharey=False)
    quantiles = []
    for row, (label, summary) in enumerate(case.summaries.items()):
        half, requests = summary.ci95.get("end_to_end", 0.0), case.first[label]
        colour = COLOURS[row % len(COLOURS)]
        drawn: dict[str, Any] = {"color": colour, "linestyle": "-" if row < len(COLOURS) else "--"}
        panels[0].errorbar(
            summary.mean["end_to_end"], row, xerr=half, fmt="o", color=colour, capsize=3
        )
        ttft = (requests.first_token - requests.arrival)[np.argsort(requests.arrival)]
        panels[1].plot(running_mean(ttft, 40, whole=True), label=label, linewidth=1.2, **drawn)
        tbt = time_per_output_token(requests, prefilled_first_token=True)
        quantiles.append(tbt[~np.isnan(tbt)] * 1e3)
        panels[3].plot(*_queue(requests), linewidth=1.0, **drawn)
    panels[0].set_yticks(range(len(case.summaries)), list(case.summaries))
    panels[2].boxplot(quantiles, orientation="horizontal", showfliers=False, whis=(1, 99))
    panels[2].set_yticks(range(1, len(quantiles) + 1), list(case.first))
    panels[1].legend(frameon=False, fontsize="small", ncols=2)
    for panel in (panels[0], panels[2]):
        panel.invert_yaxis()
    finish_axes(panels[0], "until all requests are served, s")
    finish_axes(panels[1], "request, by arrival", "TTFT, s")
    finish_axes(panels[2], "time between tokens of a request, ms (1st to 99th percentile)")
    finish_axes(panels[3], "time, s", "requests queued at instances")
    return figure


def draw_training(trained: Mapping[Variant, Sequence[Trained]]) -> Any:
    """Return mean rewards of the training episodes and the validation, a line a training."""
    figure, panels = create_panels(2, 2, (5.5, 3.8), sharex=False, sharey=False)
    for i, (variant, runs) in enumerate(trained.items()):
        for j, training in enumerate(runs):
            episodes = range(1, len(training.rewards) + 1)
            label = variant if j == 0 else None
            panels[0].plot(episodes, training.rewards, color=COLOURS[i], label=label)
            panels[1].plot(episodes, training.latencies, color=COLOURS[i])
    panels[0].set_ylabel("mean reward of a decision")
    panels[1].set_ylabel("validation, mean request latency, s")
    panels[1].set_yscale("log")
    for panel in panels:
        finish_axes(panel, "round of episodes")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].legend(frameon=False)
    return figure


def _queue(requests: RequestRecords) -> tuple[FloatArray, FloatArray]:
    """Return seconds, and how many were placed by then and not started."""
    time = np.linspace(0.0, float(requests.end.max()), 400)
    placed = np.searchsorted(np.sort(requests.placed), time, "right")
    started = np.searchsorted(np.sort(requests.start), time, "right")
    return time, (placed - started).astype(np.float64)


def train_routers(
    config: SimulationConfig,
    out: Path,
    router: RouterConfig = RouterConfig(),
    agent: AgentConfig = AgentConfig(),
    training: TrainingConfig = TrainingConfig(),
    variants: Sequence[Variant] = VARIANTS,
    checkpoints: dict[str, list[str]] | None = None,
    pooled: list[str] | None = None,
    train_on: dict[str, dict[str, Any]] | None = None,
    cases: dict[str, dict[str, Any]] | None = None,
    published: dict[str, float] | None = None,
    workers: int | None = None,
) -> int:
    """Train routers on a simulated cluster, and compare them with the configured policies.

    One router is trained for each reward and seed; all are compared over as many episodes as the
    configuration has seeds. Writes checkpoints, tables and figures. Run it again to resume after
    Ctrl-C.

    Args:
        config: of the simulation; its policies are compared with, the first is the base of the
            gains, and its seeds are the episodes.
        out: folder; run it again to resume.
        router: the task.
        agent: how the network learns.
        training: how long.
        variants: rewards to train with: baseline, aware, guided; [] to train nothing.
        checkpoints: label -> folders of routers that were trained before, one for each training;
            they are compared too.
        pooled: labels of policies and checkpoints whose requests wait at the router until there
            is a place for them. Requests of the others queue at their instances.
        train_on: title -> key -> value, of simulations to train on, in turn; as configured when
            not given.
        cases: title -> key -> value, of simulations to compare in; as configured if not set.
        published: label -> improvement over the base in percent, shown beside.
        workers: trainings at once; one per core if not set.

    Returns:
        The exit status.

    Raises:
        ValueError: an invalid key or value, or a folder of something else.
    """
    if variants == [] and (out / "training").is_dir():
        raise ValueError(f"{out}: holds trainings, but variants is empty; choose another folder")
    if workers is not None and workers < 1:
        raise ValueError(f"workers: must be at least 1, not {workers}")
    if not (out / "training").is_dir():
        refuse_foreign_folder(out, "papers train-router", "study.json", overwrite=False)
    learned_in = _changed(config, "train_on", train_on or {"": {}})
    asked = _changed(config, "cases", cases or {"as configured": {}})
    checkpoints, pooled = checkpoints or {}, pooled or []
    taking_part = competitors(config, checkpoints, pooled)
    left_out = [_LABELS[variant] for variant in VARIANTS if variant not in variants]
    shown = {label: gain for label, gain in (published or {}).items() if label not in left_out}
    _refuse_study(learned_in, asked, taking_part, [_LABELS[one] for one in variants], shown)
    used = [*learned_in.values(), *asked.values()]
    notes = about("papers train-router", config)
    notes |= announce_traces("papers train-router", [each.trace for each in used])
    compile_notice()
    began = time.monotonic()
    task = tuple(learned_in.values()), router, agent, training
    jobs = [
        Job(*task, variant, seed, out / "training" / f"{variant}-{seed}")
        for variant in variants
        for seed in range(training.seeds)
    ]
    trained: dict[Variant, list[Trained]] = {}
    for job, made in zip(jobs, train_all(jobs, workers), strict=True):
        trained.setdefault(job.variant, []).append(made)
    for variant, runs in trained.items():
        routers = [LearnedRouter(made.checkpoint) for made in runs]
        taking_part.append(Competitor(_LABELS[variant], routers, pooled=False))
    played = {title: play(case, taking_part, title) for title, case in asked.items()}
    seconds = time.monotonic() - began
    settings: dict[str, Any] = {
        "router": asdict(router) | {"profile": router.profile and str(router.profile)},
        "agent": asdict(agent),
        "training": asdict(training),
    } | ({"train_on": train_on} if train_on else {})
    _write_checkpoints(out, notes | settings, trained, played)
    figures = {"training.png": draw_training(trained)} if trained else {}
    figures["episode.png"] = draw_episode(next(iter(played.values())))
    table = study_table(played, shown)
    table += [
        f"Means over {config.seeds} episodes, ± half a 95% interval. Latency gain: of a request, "
        f"over {taking_part[0].label}, paired by episode; gain: of the time until all are served; "
        "paper: published for the latter.",
        "",
        f"{seconds:.0f} s, episodes that were trained before left out.",
        "",
    ]
    settings |= {"variants": list(variants), "pooled": pooled, "cases": cases or {}}
    settings["checkpoints"] = {
        label: {
            folder: hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()
            for folder in folders
        }
        for label, folders in checkpoints.items()
    }
    write_study(out, notes | settings, _rows(played), table, figures)
    return 0


def _changed(
    config: SimulationConfig, key: str, changes: dict[str, dict[str, Any]]
) -> dict[str, SimulationConfig]:
    return {title: changed_config(config, of, f"{key}.{title}") for title, of in changes.items()}


def _write_checkpoints(
    out: Path,
    notes: dict[str, Any],
    trained: dict[Variant, list[Trained]],
    played: dict[str, CaseFigures],
) -> None:
    """Write every trained router, and the best one by validation to ``router``."""
    title, first = next(iter(played.items()))
    every = [made for runs in trained.values() for made in runs]
    best = min(every, key=lambda made: min(made.latencies), default=None)
    for variant, runs in trained.items():
        figures = first.summaries[_LABELS[variant]].mean
        for seed, made in enumerate(runs):
            provenance = notes | {
                "command": "headway " + " ".join(sys.argv[1:]),
                "commit": ", ".join(made.commits),
                "seed": seed,
                "episode kept": made.episode + 1,
                "request latency in validation, s": min(made.latencies),
                f"{title}, mean of all trainings": {
                    name: figures[name] for name in ("end_to_end", "latency", "ttft")
                },
                "seconds of training": round(made.seconds),
            }
            folders = [out / "checkpoints" / f"{variant}-{seed}"]
            if made is best:
                print(f"best by validation, {min(made.latencies):.2f} s: {variant}, seed {seed}")
                folders.append(out / "router")
            for folder in folders:
                replace(made.checkpoint, provenance=provenance).save(folder)


def _rows(played: dict[str, CaseFigures]) -> list[dict[str, Any]]:
    return [
        {
            "case": title,
            "policy": label,
            **summary.plain,
            "gains": {name: gain for name, (gain, _) in case.gains[label].items()},
            "gains_ci95": {name: half for name, (_, half) in case.gains[label].items()},
        }
        for title, case in played.items()
        for label, summary in case.summaries.items()
    ]
