"""The command ``headway``: one verb per task, every verb with YAML and overrides."""

import importlib
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import metadata
from typing import Any, NamedTuple

from rescheduler.commands.log_format import escaped
from rescheduler.commands.quiet import quieten, quieten_loggers

__all__ = ["main"]


class _Verb(NamedTuple):
    """A verb.

    Attributes:
        function: ``module:name``, loaded when the verb is used.
        text: what it does, in the imperative.
        members: names that follow the verb -> functions and texts, where it has several.
    """

    function: str
    text: str
    members: Mapping[str, tuple[str, str]] = {}


_DATASET = {
    "inspect": (
        "data_collection.dataset.inspect_dataset:inspect",
        "print counts and length distributions, and plot them",
    ),
    "validate": (
        "data_collection.dataset.validate_dataset:validate",
        "check everything that training relies on",
    ),
    "merge": ("data_collection.dataset.merge_datasets:merge", "merge datasets into a new one"),
    "transcripts": (
        "data_collection.dataset.export_transcripts:export_transcripts",
        "keep a dataset as its prompts and answers, to collect it again from",
    ),
}

_STUDIES = {
    "scaling": (
        "rescheduler.papers.studies.scaling:scaling_study",
        "how imbalance grows with workers and batches (BF-IO's theorems)",
    ),
    "barrier-tax": (
        "rescheduler.papers.studies.barrier_tax:barrier_tax_study",
        "what routing gains under several step-time models",
    ),
    "rescheduling": (
        "rescheduler.papers.studies.rescheduling:rescheduling_study",
        "migration planners in several cases (STAR's figures)",
    ),
    "fairbatching": (
        "rescheduler.papers.studies.fairbatching:fairbatching_study",
        "requests served in time, by load (FairBatching)",
    ),
}

_GROUPS: dict[str, dict[str, _Verb]] = {
    "Collect and train": {
        "model": _Verb("data_collection.model_command:model", "prepare the embedded model"),
        "collect": _Verb(
            "data_collection.workload.collect:collect", "collect a dataset from a model in vLLM"
        ),
        "dataset": _Verb("", "inspect, validate, merge or export datasets", _DATASET),
        "train": _Verb("rescheduler.commands.train:train", "train a predictor with Lightning"),
        "train-length": _Verb(
            "rescheduler.papers.prompt_length.train_length:train_length",
            "train predictors of answer lengths that read the prompt",
        ),
        "tune": _Verb("predictor.training.tuning:tune", "search a predictor's hyperparameters"),
        "evaluate": _Verb(
            "predictor.evaluation.evaluate:evaluate", "compare a predictor with baselines"
        ),
        "recalibrate": _Verb(
            "rescheduler.monitoring.recalibrate:recalibrate",
            "recalibrate a predictor on served requests",
        ),
    },
    "Serve": {
        "launch": _Verb("rescheduler.launching.launch:launch", "start a deployment's engines"),
        "serve": _Verb("rescheduler.serving.serve:serve", "serve a deployment at one address"),
        "coordinator": _Verb(
            "rescheduler.coordinator.coordinator_command:coordinator",
            "decide for many proxies of a deployment",
        ),
        "picker": _Verb(
            "rescheduler.gateway.picker_command:picker",
            "pick engines for an Envoy gateway, by a routing policy",
        ),
        "replay": _Verb(
            "rescheduler.serving.replay:replay", "show a recorded log on a page, or two of them"
        ),
        "drain": _Verb("rescheduler.serving.drain:drain", "drain an instance"),
        "status": _Verb("rescheduler.on_ray.status:status", "show a deployment on a Ray cluster"),
        "restart": _Verb(
            "rescheduler.on_ray.restart:restart", "restart its engines, one after another"
        ),
        "stop": _Verb("rescheduler.on_ray.stop:stop", "stop it"),
        "watch": _Verb(
            "rescheduler.monitoring.watch:watch", "show forecasts of the running requests"
        ),
        "profile": _Verb(
            "rescheduler.profiling.profile_command:profile", "measure an engine's step times"
        ),
        "keys": _Verb(
            "predictor.live.curve_keys:keys", "create keys for telemetry between machines"
        ),
        "demo": _Verb("rescheduler.demo.demo:demo", "watch requests move between engines"),
    },
    "Simulate": {
        "advise": _Verb(
            "rescheduler.simulator.advice.advise:advise",
            "estimate how much forecasting would help on a trace",
        ),
        "simulate": _Verb("rescheduler.simulator.simulate:simulate", "compare routing policies"),
        "sweep": _Verb(
            "rescheduler.simulator.experiments.sweep:sweep",
            "simulate many combinations of settings",
        ),
        "study": _Verb("", "reproduce a paper's figure or table", _STUDIES),
        "record": _Verb(
            "rescheduler.simulator.forecasts.record_forecasts:record",
            "record a predictor's forecasts of a dataset, for simulations",
        ),
        "train-router": _Verb(
            "rescheduler.papers.jain_router.train_router:train_routers",
            "train routers by reinforcement learning, and compare them",
        ),
    },
    "Check": {
        "doctor": _Verb(
            "rescheduler.commands.doctor:doctor", "check the installation, and suggest remedies"
        ),
    },
}

_VERBS = {name: verb for group in _GROUPS.values() for name, verb in group.items()}

_HELP = ("-h", "--help", "help")
_VERSION = ("-V", "--version")

_OWN_COMMAND_LINES = ("train",)
"""Verbs whose functions take the command line: Lightning builds its parser."""

_USAGE = """\
usage: headway VERB [options]

Forecast how many tokens every running LLM request still has to generate.

{verbs}

A first round, on the embedded model:
  headway collect runs/demo --config configs/collect/quick.yaml
  headway train fit --config configs/predictor/survival.yaml --data.dataset runs/demo
  headway evaluate runs/demo runs/survival

Routing policies on a simulated cluster:
  headway advise my_trace.csv
  headway simulate --config configs/papers/bfio_table1.yaml

Forecasts of a vLLM server that runs with Headway's worker (docs/watch.md):
  headway watch --connect tcp://127.0.0.1:5557

Every verb takes --help, --config FILE.yaml, --print-config and --verbose; headway --version prints
the version.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; return the exit status.

    An input error is reported in one line on standard error, with exit status 1; the status of
    a usage error is 2, and that of Ctrl-C is 130.
    """
    given = sys.argv[1:] if arguments is None else arguments
    verb, rest = (given[0], given[1:]) if given else ("--help", [])
    if verb == "help" and rest:
        verb, rest = rest[0], [*rest[1:], "--help"]
    if verb not in (*_HELP, *_VERSION, *_VERBS):
        return _unknown("headway", "verb", verb, _VERBS)
    quieten(verbose="--verbose" in rest)
    try:
        result = _printed(verb, rest)
    except KeyboardInterrupt:
        print("headway: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has read enough
        sys.stdout = None
        return 0
    except (ValueError, RuntimeError, OSError) as error:
        print(escaped(f"headway {verb}: {error}"), file=sys.stderr)
        return 1
    return int(result or 0)


def _usage() -> str:
    groups = [
        "\n".join([f"{title}:", *(f"  {name:<14}{verb.text}" for name, verb in verbs.items())])
        for title, verbs in _GROUPS.items()
    ]
    return _USAGE.format(verbs="\n\n".join(groups))


def _printed(verb: str, rest: list[str]) -> Any:
    try:
        return _run(verb, rest)
    finally:
        _flush()


def _flush() -> None:
    """Write out what was printed, before the interpreter does where no error can be caught."""
    if sys.stdout is None:  # closed by the shell
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; the exit status says how the verb ended
        sys.stdout = None
    except OSError:  # a full disk; what is left is not tried again
        sys.stdout = None
        raise


def _run(verb: str, rest: list[str]) -> Any:
    if verb in _HELP:
        print(_usage())
        return 0
    if verb in _VERSION:
        print(f"headway {metadata.version('headway')}")
        return 0
    found = _VERBS[verb]
    if verb in _OWN_COMMAND_LINES:
        run = _load(found.function)
        quieten_loggers(verbose="--verbose" in rest)
        return run(rest)
    function, prog = found.function, f"headway {verb}"
    if found.members:
        name, rest = (rest[0], rest[1:]) if rest else ("--help", [])
        if name in ("-h", "--help"):
            lines = [f"  {known:<14}{text}" for known, (_, text) in found.members.items()]
            print("\n".join([f"usage: {prog} NAME [options]", "", *lines]))
            return 0
        if name not in found.members:
            return _unknown(prog, "name", name, found.members)
        function, prog = found.members[name][0], f"{prog} {name}"
    from rescheduler.commands.command import run_command

    loaded = _load(function)
    quieten_loggers(verbose="--verbose" in rest)
    return run_command(loaded, rest, prog)


def _unknown(prog: str, what: str, given: str, known: Mapping[str, Any]) -> int:
    near = get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    print(f"tip: For a list run: {prog} --help", file=sys.stderr)
    print(f"error: unknown {what} {given!r}{hint}", file=sys.stderr)
    return 2


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
