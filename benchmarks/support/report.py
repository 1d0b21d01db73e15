"""What every benchmark writes: figures with what they depend on, and results to go on from.

And differences between arms that served the same requests in the same rounds.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_collection.files import write_text_atomically
from data_collection.versions import machine, source_commit, versions


def arguments(description: str, quick: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share: a short run, and the file."""
    parser = argparse.ArgumentParser(description=description)
    if quick:
        parser.add_argument("--quick", action="store_true", help="a short run, for trying it out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    return parser


def report(name: str, figures: dict[str, float], out: Path | None, **further: Any) -> None:
    """Print the figures as a table and, if asked, write them with machine and versions."""
    width = max(map(len, figures))
    print(f"\n| {'figure':<{width}} | value |\n|{'-' * (width + 2)}|---:|")
    for key, value in figures.items():
        print(f"| {key:<{width}} | {value:.6g} |")
    write_report(name, figures, out, **further)


def write_report(
    name: str,
    figures: Mapping[str, float | str],
    out: Path | None,
    quiet: bool = False,
    **further: Any,
) -> None:
    """Write figures with what they depend on, those that are not known (NaN) as null."""
    if out is None:
        return
    document = {
        "name": name,
        "commit": source_commit(),
        "machine": machine(),
        "versions": versions(),
        "figures": {name: None if value != value else value for name, value in figures.items()},
        **further,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(out, json.dumps(document, indent=1) + "\n")
    if not quiet:
        print(f"\nwrote {out}")


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return a page with its tables replaced, each between two comments."""
    for name, made in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page has no {begin} with its end")
        page = f"{before}{begin}\n{made}\n{end}{after}"
    return page


class Cells:
    """Results by name, a file each, so that a measurement goes on where it was interrupted.

    Those of other settings, as JSON, are none.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._settings = json.loads(json.dumps(settings or {}))

    def file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def read(self, name: str) -> Any:
        """Return a result, or None where there is none of these settings."""
        if not self.file(name).is_file():
            return None
        kept = json.loads(self.file(name).read_text())
        return kept["result"] if kept.get("settings") == self._settings else None

    def write(self, name: str, result: Any) -> None:
        file = self.file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps({"settings": self._settings, "result": result}))


@contextmanager
def resumable() -> Iterator[None]:
    """End the program where a measurement fails or is interrupted, saying that it can go on."""
    resumed = "The same command goes on with what is missing."
    try:
        yield
    except RuntimeError as error:
        sys.exit(f"{error}\n{resumed}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted\n{resumed}")


def rotated(arms: Sequence[str], number: int) -> list[str]:
    """Return the arms in a round's order: each round begins with another."""
    first = number % max(1, len(arms))
    return [*arms[first:], *arms[:first]]


class Estimate(NamedTuple):
    """A mean over rounds, with half its 95% interval by Student's t (NaN of one round)."""

    mean: float
    half: float
    rounds: int

    def shown(self, mean: str = "+.0f", half: str = ".0f") -> str:
        """Return the mean in this format, and half its interval where there is one."""
        return f"{self.mean:{mean}}" + ("" if np.isnan(self.half) else f" ± {self.half:{half}}")

    def figures(self, name: str) -> dict[str, float]:
        """Return the mean by this name, and half its interval by one that begins with it."""
        return {name: self.mean, f"{name}_half_interval": self.half}


def mean_of(values: Mapping[int, float]) -> Estimate:
    """Return the mean over the rounds, by number; NaN where a round says nothing."""
    found = np.array([value for value in values.values() if not np.isnan(value)])
    if len(found) == 0:
        return Estimate(float("nan"), float("nan"), 0)
    # vLLM's workers, which load a benchmark's module, trip over llvmlite, which this loads.
    from rescheduler.simulator.results.metrics import half_interval

    half = float(half_interval(found)) if len(found) > 1 else float("nan")
    return Estimate(float(found.mean()), half, len(found))


def percent_change(values: Mapping[int, float], others: Mapping[int, float]) -> Estimate:
    r"""Return the mean change in percent, :math:`\bar d \pm t_{0.975, n - 1}\, s_d / \sqrt n`.

    Only rounds that both have count. What a round's requests and the machine at that time do to
    both alike is not in the interval.

    Args:
        values: by round.
        others: by round, from which they differ.
    """
    return mean_of({i: 100 * (values[i] / others[i] - 1) for i in values if others.get(i)})


Rounds = Mapping[int, Mapping[str, float]]
"""Figures of an arm, by round."""


def by_round(rounds: Rounds, figure: str) -> dict[int, float]:
    """Return one figure of an arm."""
    return {number: figures[figure] for number, figures in rounds.items()}


def change(arm: Rounds, base: Rounds, figure: str) -> Estimate:
    """Return how much a figure differs from that of another arm, in percent."""
    return percent_change(by_round(arm, figure), by_round(base, figure))


def gain(arm: Rounds, base: Rounds, figure: str, more_is_better: bool) -> Estimate:
    """Return by how much a figure is better than that of another arm, in percent."""
    found = change(arm, base, figure)
    return found if more_is_better else found._replace(mean=-found.mean)


def relative_cells(
    arms: Mapping[str, Rounds], arm: str, base: str, figures: Sequence[str]
) -> list[str]:
    """Return the base's means, or another arm's changes in percent with half their intervals."""
    if arm == base:
        return [f"{np.mean([one[name] for one in arms[base].values()]):.4g}" for name in figures]
    return [f"{change(arms[arm], arms[base], name).shown()}%" for name in figures]
