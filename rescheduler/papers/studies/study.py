"""`headway study`: questions of a paper that take more than one table of simulations.

A study is a function that declares its cases and its report from a configuration and options of
its own: the command line takes them from its signature, and all studies are run here.
"""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

from rescheduler.papers.studies.barrier_tax import barrier_tax
from rescheduler.papers.studies.declaration import Study
from rescheduler.papers.studies.fairbatching import fairbatching
from rescheduler.papers.studies.rescheduling import rescheduling
from rescheduler.papers.studies.scaling import scaling
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.cells import groups
from rescheduler.simulator.experiments.runner import compute
from rescheduler.simulator.results.report_files import about, write_study

__all__ = [
    "barrier_tax_study",
    "fairbatching_study",
    "rescheduling_study",
    "run_study",
    "scaling_study",
]

_OWN_ARGUMENTS = """\
Args:
        out: folder; run it again to resume.
        workers: processes at once; one per core when not given.
"""


def run_study(
    name: str, study: Study, config: SimulationConfig, out: Path, workers: int | None = None
) -> int:
    """Simulate all cases; write table, JSON and figures; return the exit status.

    Args:
        name: of the study.
        study: what it simulates and reports.
        config: what all cases share.
        out: folder; run it again to resume.
        workers: processes at once; one per core when not given.

    Raises:
        ValueError: no cases, a key that does not exist, a value that it refuses, or a folder of
            something else.
        RuntimeError: a cell that could not be computed.
    """
    if not study.cases:
        raise ValueError("cases: at least one, a name with the keys that it changes")
    verb = f"study {name}"
    found = [
        group
        for case, changes in study.cases.items()
        for group in groups(config, {k: [v] for k, v in changes.items()} | dict(study.vary), case)
    ]
    computed = compute(found, out, verb, "study.json", workers=workers)
    if computed.interrupted:
        raise KeyboardInterrupt
    for cell, what in computed.failed:
        raise RuntimeError(f"{cell.title}: {what}")
    report = study.report(computed.rows)
    write_study(
        out, about(verb, config) | computed.traces, report.rows, report.table, report.figures
    )
    return 0


def _verb(name: str, declare: Callable[..., Study]) -> Callable[..., int]:
    """Return the function of a study's verb: the options of the study, its folder and workers."""

    def study(config: SimulationConfig, out: Path, workers: int | None = None, **own: Any) -> int:
        return run_study(name, declare(config, **own), config, out, workers)

    declared, runs = signature(declare).parameters, signature(run_study).parameters
    first, *others = declared.values()
    parameters = [first, runs["out"], *others, runs["workers"]]
    # Without defaults first, as a signature has to be.
    parameters.sort(key=lambda parameter: parameter.default is not Parameter.empty)
    study.__signature__ = Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    study.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": int}
    study.__doc__ = (declare.__doc__ or "").replace("Args:\n", _OWN_ARGUMENTS, 1)
    return study


scaling_study = _verb("scaling", scaling)
barrier_tax_study = _verb("barrier-tax", barrier_tax)
rescheduling_study = _verb("rescheduling", rescheduling)
fairbatching_study = _verb("fairbatching", fairbatching)
