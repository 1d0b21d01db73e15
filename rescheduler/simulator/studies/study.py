"""`headway study`: questions of a paper that take more than one table of simulations."""

import sys
from collections.abc import Callable

from rescheduler.simulator.studies.barrier_tax import barrier_tax_command
from rescheduler.simulator.studies.fairbatching_study import fairbatching_command
from rescheduler.simulator.studies.rescheduling_study import rescheduling_command
from rescheduler.simulator.studies.scaling_study import scaling_command

__all__ = ["study_command"]

_STUDIES: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "scaling": (scaling_command, "how imbalance grows with workers and batches (BF-IO's theorems)"),
    "barrier-tax": (barrier_tax_command, "what routing is worth, for several step-time models"),
    "rescheduling": (rescheduling_command, "migration planners in several cases (STAR's figures)"),
    "fairbatching": (fairbatching_command, "what is served in time, over the load (FairBatching)"),
}


def study_command(arguments: list[str]) -> int:
    """Run the study that is named first; return the exit status.

    Args:
        arguments: name of the study, and its own command line.
    """
    name = arguments[0] if arguments else "--help"
    if name in _STUDIES:
        return _STUDIES[name][0](arguments[1:])
    lines = [f"  {known:<14}{what}" for known, (_, what) in _STUDIES.items()]
    usage = "\n".join(["usage: headway study NAME --config FILE --out FOLDER", "", *lines])
    if name in ("-h", "--help"):
        print(usage)
        return 0
    print(f"headway study: no study {name!r}\n{usage}", file=sys.stderr)
    return 2
