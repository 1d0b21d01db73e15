"""Which parts of Headway work on which version of vLLM, and with which models, by running them.

    python -m benchmarks.compatibility [--versions 0.31 0.33 ...] [--models qwen3 ...]
        [--chaos MINUTES] [--json OUT] [--page PAGE]

Each version is downloaded once into a folder of its own, and runs the contract tests and
`tests/versions`: capture, forecasts, batches by deadlines and moves, on two layers of SmolLM2 and
real engines. Versions without a CPU wheel run their own Python on the compiled part of the
installed one. With ``--chaos`` each version also serves `benchmarks.chaos` for so long: nothing may
be lost, changed or leaked. Models have random weights, and run `tests/models` on the installed
version.

What is not asked for is kept as the file has it. With ``--page`` the tables in that page are
replaced.
"""

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.report import arguments, with_tables, write_report
from benchmarks.support.tiny_models import TINY_MODELS
from benchmarks.support.vllm_versions import environment_of
from data_collection.files import write_text_atomically
from data_collection.versions import NEWEST_CPU_VLLM, SUPPORTED_VLLM
from rescheduler.simulator.results.report import markdown_table

_ROOT = Path(__file__).parents[1]
PARTS = ("contract", "capture", "forecasts", "batching", "moves")
MODEL_PARTS = ("capture", "forecasts", "moves")
TABLES = {
    "versions": ((*PARTS, "chaos"), SUPPORTED_VLLM),
    "models": (MODEL_PARTS, TINY_MODELS),
}
"""Of the page: columns, and rows as far as they have run."""
NEVER = ("blocks_leaked", "honest_4xx", "honest_5xx", "lost", "poison_5xx", "tokens_changed")
"""What chaos counts and must not find."""
VERSION_TESTS = ("tests/integration/test_vllm_contract.py", "tests/versions")


def main() -> None:
    parser = arguments("which parts work on which version of vLLM, with which models", quick=False)
    choose: dict[str, Any] = {"nargs": "*", "default": []}
    parser.add_argument("--versions", choices=SUPPORTED_VLLM, **choose)
    parser.add_argument("--models", choices=list(TINY_MODELS), **choose)
    parser.add_argument("--chaos", type=float, metavar="MINUTES", help="of each version, besides")
    parser.add_argument("--all", action="store_true", help="all versions and models")
    parser.add_argument("--page", type=Path, help="replace the tables in this page")
    options = parser.parse_args()
    if options.all:
        options.versions, options.models = list(SUPPORTED_VLLM), list(TINY_MODELS)
    if not (options.versions or options.models or options.page):
        parser.error("nothing to do: give --versions, --models, --all or --page")
    page = options.page.read_text() if options.page is not None and options.page.is_file() else ""
    if options.page is not None and not all(f"<!-- {one}: begin -->" in page for one in TABLES):
        parser.error(f"--page {options.page}: it has no place for the tables")
    figures: dict[str, str] = {}
    if options.json is not None and options.json.is_file():
        figures = json.loads(options.json.read_text())["figures"]
    for version in options.versions:
        found = run(version, VERSION_TESTS)
        found |= {"chaos": chaos(version, options.chaos)} if options.chaos is not None else {}
        figures |= said(
            f"vLLM {version}", {f"{part}_{version}": how for part, how in found.items()}
        )
    for model in options.models:
        found = run(NEWEST_CPU_VLLM, ["tests/models"], model)
        made = TINY_MODELS[model]
        parts = MODEL_PARTS if made.captured else MODEL_PARTS[:1]
        refused = {"capture": not made.captured, "moves": not made.moves}
        passed = {part: "refused" if refused.get(part) else "passed" for part in parts}
        how = {
            f"{part}_{model}": passed[part] if found[part] == "passed" else found[part]
            for part in parts
        }
        figures |= said(model, how)
        flags = " ".join(f"`{flag}`" for flag in made.flags)
        figures |= {f"flags_{model}": flags} if flags else {}
        write_report("compatibility", figures, options.json, quiet=True)
    tables = {name: table(*of, figures) for name, of in TABLES.items()}
    print("\n\n".join(tables.values()))
    write_report("compatibility", figures, options.json, tables=list(tables.values()))
    if options.page is not None:
        write_text_atomically(options.page, with_tables(options.page.read_text(), tables))
    if any(how in ("failed", "not run") for how in figures.values()):
        sys.exit(1)


def said(what: str, outcomes: dict[str, str]) -> dict[str, str]:
    parts = ", ".join(f"{name.rsplit('_', 1)[0]} {how}" for name, how in outcomes.items())
    print(f"{what}: {parts}", file=sys.stderr, flush=True)
    return outcomes


def table(parts: Sequence[str], names: Iterable[str], figures: Mapping[str, str]) -> str:
    """Return a table, with a row for each version or model that has run."""
    rows = []
    for name in names:
        if f"{parts[0]}_{name}" not in figures:
            continue
        cells = [str(figures.get(f"{part}_{name}", "")) for part in parts]
        if flags := figures.get(f"flags_{name}"):
            cells[-1] += f" with {flags}"
        rows.append([name, *cells])
    return "\n".join(markdown_table(["", *parts], rows))


def run(version: str, tests: Sequence[str], model: str | None = None) -> dict[str, str]:
    """Return how each part fared: ``passed``, ``failed`` or ``not run``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        printed = _ran(version, ["pytest", "-q", *tests, f"--junit-xml={report}"], report, model)
        return dict.fromkeys(PARTS, "not run") if printed is None else outcomes_of(report, printed)


def chaos(version: str, minutes: float) -> str:
    """Return how a deployment of a version fared: ``passed``, ``failed`` or ``not run``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "chaos.json"
        command = ["benchmarks.chaos", f"--minutes={minutes}", f"--json={report}"]
        if _ran(version, command, report) is None:
            return "not run"
        figures = json.loads(report.read_text())["figures"]
        print(f"vLLM {version}: {figures}", file=sys.stderr)
        went_well = figures["moves"] > 0 and not any(figures[name] for name in NEVER)
        return "passed" if went_well else "failed"


def _ran(version: str, module: Sequence[str], report: Path, model: str | None = None) -> str | None:
    """Run a module with a version; return what it printed, or None if it wrote no report."""
    environment = environment_of(version)
    if model is not None:
        environment["HEADWAY_TEST_MODELS"] = model
    done = subprocess.run(
        [sys.executable, "-m", *module],
        env=environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.is_file():
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
        return None
    return done.stdout


def outcomes_of(report: Path, printed: str) -> dict[str, str]:
    """Return how each part fared, by pytest's report; print what failed."""
    found: dict[str, list[bool]] = {part: [] for part in PARTS}
    for case in ElementTree.parse(report).iter("testcase"):
        contract = "test_vllm_contract" in case.get("classname", "")
        name = case.get("name", "").removeprefix("test_")
        part = "contract" if contract else next((p for p in PARTS if name.startswith(p)), None)
        went_well = case.find("failure") is None and case.find("error") is None
        if case.find("skipped") is not None:  # no model of this kind was asked for
            continue
        for one in [part] if part else PARTS[1:]:  # the version itself is all parts' concern
            found[one].append(went_well)
    if not all(all(cases) for cases in found.values()):
        print(printed[-3000:])
    states = {True: "passed", False: "failed"}
    return {part: states[all(cases)] if cases else "not run" for part, cases in found.items()}


if __name__ == "__main__":
    main()
