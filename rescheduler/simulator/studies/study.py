"""`headway study`: questions of a paper that take more than one table of simulations.

A study is a function that declares its cases and its report from a configuration and options of
its own: the command line takes them from its signature, and all studies are run here.
"""

import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path

from rescheduler.simulator.config.config_parser import config_parser, parsed_config
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.cells import groups
from rescheduler.simulator.experiments.runner import compute
from rescheduler.simulator.results.report_files import about, write_study
from rescheduler.simulator.studies.barrier_tax import barrier_tax
from rescheduler.simulator.studies.declaration import Study
from rescheduler.simulator.studies.fairbatching import fairbatching
from rescheduler.simulator.studies.rescheduling import rescheduling
from rescheduler.simulator.studies.scaling import scaling

__all__ = ["run_study", "study_command"]

_STUDIES: dict[str, tuple[Callable[..., Study], str]] = {
    "scaling": (scaling, "how imbalance grows with workers and batches (BF-IO's theorems)"),
    "barrier-tax": (barrier_tax, "what routing is worth, for several step-time models"),
    "rescheduling": (rescheduling, "migration planners in several cases (STAR's figures)"),
    "fairbatching": (fairbatching, "what is served in time, over the load (FairBatching)"),
}


def study_command(arguments: list[str]) -> int:
    """Run the study that is named first; return the exit status.

    Args:
        arguments: name of the study, and its own command line.
    """
    name = arguments[0] if arguments else "--help"
    if name not in _STUDIES:
        lines = [f"  {known:<14}{what}" for known, (_, what) in _STUDIES.items()]
        usage = "\n".join(["usage: headway study NAME --config FILE --out FOLDER", "", *lines])
        if name in ("-h", "--help"):
            print(usage)
            return 0
        print(f"headway study: no study {name!r}\n{usage}", file=sys.stderr)
        return 2
    declare, _ = _STUDIES[name]
    description, *_ = (declare.__doc__ or "").partition("\n\n")
    parser = config_parser(f"study {name}", description)
    parser.add_function_arguments(declare, skip={"config"})
    parser.add_function_arguments(run_study, skip={"name", "study", "config"})
    given = parser.parse_args(arguments[1:])
    config = parsed_config(parser, given)
    _, *options = signature(declare).parameters
    study = declare(config, **{option: given[option] for option in options})
    return run_study(name, study, config, given.out, given.workers)


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
    write_study(out, about(verb, config), report.rows, report.table, report.figures)
    return 0
