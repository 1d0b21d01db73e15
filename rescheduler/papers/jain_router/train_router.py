"""`headway papers train-router`: train routers, and measure them beside other policies."""

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rescheduler.papers.jain_router.agent import AgentConfig
from rescheduler.papers.jain_router.environment import RouterConfig
from rescheduler.papers.jain_router.router_study import (
    CaseFigures,
    Competitor,
    competitors,
    draw_episode,
    draw_training,
    play,
    refuse_study,
    study_table,
)
from rescheduler.papers.jain_router.training import (
    VARIANTS,
    Job,
    Trained,
    TrainingConfig,
    Variant,
    train_all,
)
from rescheduler.routing.learned.rl import LearnedRouter
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.workers import changed_config, compile_notice
from rescheduler.simulator.results.report import about, refuse_foreign_folder, write_study
from rescheduler.simulator.workloads.trace_files import announce_traces

_LABELS: dict[Variant, str] = {variant: f"rl {variant}" for variant in VARIANTS}
"""What tables call the routers that are trained with a reward."""


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
            is a place for them; those of the others queue at their instances.
        train_on: title -> key -> value, of simulations to train on, in turn; as configured when
            not given.
        cases: title -> key -> value, of simulations to compare in; as configured when not given.
        published: label -> improvement over the base in percent, shown beside.
        workers: trainings at once; one per core when not given.

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
    refuse_study(learned_in, asked, taking_part, [_LABELS[one] for one in variants], shown)
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
    out.mkdir(parents=True, exist_ok=True)
    for variant, runs in trained.items():
        routers = [LearnedRouter(run.checkpoint) for run in runs]
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
    every = [run for runs in trained.values() for run in runs]
    best = min(every, key=lambda run: min(run.latencies), default=None)
    for variant, runs in trained.items():
        figures = first.summaries[_LABELS[variant]].mean
        for seed, run in enumerate(runs):
            provenance = notes | {
                "command": "headway " + " ".join(sys.argv[1:]),
                "commit": ", ".join(run.commits),
                "seed": seed,
                "episode kept": run.episode + 1,
                "request latency in validation, s": min(run.latencies),
                f"{title}, mean of all trainings": {
                    name: figures[name] for name in ("end_to_end", "latency", "ttft")
                },
                "seconds of training": round(run.seconds),
            }
            folders = [out / "checkpoints" / f"{variant}-{seed}"]
            if run is best:
                print(f"best by validation, {min(run.latencies):.2f} s: {variant}, seed {seed}")
                folders.append(out / "router")
            for folder in folders:
                replace(run.checkpoint, provenance=provenance).save(folder)


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
