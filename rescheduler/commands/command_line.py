"""The command ``headway``: one verb a task, every verb with YAML and overrides."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["main"]

_VERBS: dict[str, tuple[str, str]] = {
    "doctor": (
        "rescheduler.commands.doctor:doctor",
        "say what is installed and what would not work",
    ),
    "model": ("data_collection.model_command:model", "prepare the embedded model"),
    "collect": (
        "data_collection.workload.collect:collect",
        "collect a dataset from a model in vLLM",
    ),
    "dataset": ("", "inspect, validate or merge datasets"),
    "train": ("predictor.training.train_command:train", "train a predictor with Lightning"),
    "train-length": (
        "predictor.prompt_length.train_length:train_length",
        "train predictors of answer lengths that read the prompt",
    ),
    "train-router": (
        "rescheduler.learned_router.train_router:train_router_command",
        "train routers by reinforcement and compare them",
    ),
    "tune": ("predictor.training.tuning:tune", "search a predictor's shape and training"),
    "evaluate": (
        "predictor.evaluation.evaluate:evaluate",
        "measure a predictor beside its comparators",
    ),
    "advise": (
        "rescheduler.simulator.advice.advise:advise",
        "say what forecasts are worth on a trace",
    ),
    "simulate": ("rescheduler.simulator.simulate:simulate_command", "compare routing policies"),
    "sweep": (
        "rescheduler.simulator.experiments.sweep:sweep_command",
        "simulate over many settings",
    ),
    "study": (
        "rescheduler.simulator.studies.study:study_command",
        "reproduce a paper's scaling or table",
    ),
    "record": (
        "rescheduler.simulator.forecasts.record_forecasts:record",
        "keep a predictor's forecasts of a dataset, to simulate with",
    ),
    "watch": (
        "rescheduler.monitoring.watch:watch",
        "show what running requests will still generate",
    ),
    "serve": ("rescheduler.proxy.serve:serve", "serve a prefill/decode deployment"),
    "drain": ("rescheduler.proxy.drain:drain", "move everything away from an instance"),
    "profile": (
        "rescheduler.profiling.profile_command:profile",
        "measure how long an engine's steps take",
    ),
    "recalibrate": (
        "rescheduler.monitoring.recalibrate:recalibrate",
        "mend a predictor from what it served",
    ),
    "launch": ("rescheduler.engines.launch:launch", "start a deployment's engines"),
    "demo": ("rescheduler.demo.demo:demo", "see requests move between engines"),
    "keys": ("predictor.live.curve_keys:keys", "make keys for telemetry between machines"),
}

_OWN_COMMAND_LINES = (
    *("train", "train-router", "simulate", "sweep", "study", "launch", "serve", "drain", "demo"),
)
"""Verbs that read their arguments themselves."""

_DATASET_VERBS = {
    "inspect": "data_collection.dataset.inspect_dataset:inspect",
    "validate": "data_collection.dataset.validate_dataset:validate",
    "merge": "data_collection.dataset.merge_datasets:merge",
}

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

Every verb takes --help, --config FILE.yaml and --print_config.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; return the exit status.

    A mistake in the input is told in one line on standard error, with exit status 1;
    a mistake in the command line is 2; Ctrl-C is 130.
    """
    given = sys.argv[1:] if arguments is None else arguments
    verb, rest = (given[0], given[1:]) if given else ("--help", [])
    if verb in ("-h", "--help"):
        print(_usage())
        return 0
    if verb not in _VERBS:
        print(f"headway: unknown verb {verb!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        result = _run(verb, rest)
    except KeyboardInterrupt:
        print("headway: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has read enough
        sys.stdout = None
        return 0
    except (ValueError, RuntimeError, OSError) as error:
        print(f"headway {verb}: {error}", file=sys.stderr)
        return 1
    return int(result or 0)


def _usage() -> str:
    lines = [f"  {verb:<14}{text}" for verb, (_, text) in _VERBS.items()]
    return _USAGE.format(verbs="\n".join(lines))


def _run(verb: str, rest: list[str]) -> Any:
    if verb in _OWN_COMMAND_LINES:
        return _load(_VERBS[verb][0])(rest)
    from jsonargparse import auto_cli

    from rescheduler.commands.command_parser import CommandParser

    if verb == "dataset":
        functions: dict[str, Any] = {name: _load(where) for name, where in _DATASET_VERBS.items()}
        return auto_cli(functions, args=rest, prog="headway dataset", parser_class=CommandParser)
    return auto_cli(
        _load(_VERBS[verb][0]), args=rest, prog=f"headway {verb}", parser_class=CommandParser
    )


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
