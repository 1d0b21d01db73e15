"""The command ``headway``: one verb per task, every verb with YAML and overrides."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import metadata
from typing import Any, NamedTuple

from rescheduler.commands.event_loop import escaped, quieten, quieten_loggers


class Verb(NamedTuple):
    """A verb.

    Attributes:
        function: ``module:name``, loaded when the verb is used, or empty where a name must follow.
        text: what it does, in the imperative.
    """

    function: str
    text: str


_DATASET = "data_collection.dataset"
_LIGHTNING = "rescheduler.commands.train:train"
_RAY = "rescheduler.on_ray"
_STUDIES = "rescheduler.papers.studies"

VERBS = {
    "model": Verb("data_collection.models:model", "prepare the embedded model"),
    "collect": Verb("data_collection.workload.collect:collect", "collect a dataset from vLLM"),
    "dataset": Verb("", "inspect, validate, merge or export datasets"),
    "dataset inspect": Verb(f"{_DATASET}.inspect_dataset:inspect", "print and plot its lengths"),
    "dataset validate": Verb(f"{_DATASET}.validate_dataset:validate", "check it for training"),
    "dataset merge": Verb(f"{_DATASET}.dataset_commands:merge", "merge datasets into a new one"),
    "dataset transcripts": Verb(
        f"{_DATASET}.dataset_commands:export_transcripts",
        "keep prompts and answers, to collect again",
    ),
    "train": Verb("", "train a predictor, or search its hyperparameters"),
    "train fit": Verb(_LIGHTNING, "train a predictor with Lightning"),
    "train validate": Verb(_LIGHTNING, "measure a training on the validation part"),
    "train test": Verb(_LIGHTNING, "measure a training on the test part"),
    "train tune": Verb("predictor.training.tuning:tune", "search a predictor's hyperparameters"),
    "evaluate": Verb("predictor.evaluation.evaluate:evaluate", "compare with other predictors"),
    "evaluate recalibrate": Verb(
        "rescheduler.monitoring.recalibrate:recalibrate", "recalibrate it on served requests"
    ),
    "launch": Verb("rescheduler.engines.launch_engines:launch", "start a deployment's engines"),
    "serve": Verb("rescheduler.serving.serve:serve", "serve a deployment at one address"),
    "coordinator": Verb(
        "rescheduler.coordinator.coordinator:coordinator", "decide for many proxies"
    ),
    "picker": Verb("rescheduler.gateway.picker_command:picker", "pick engines for Envoy"),
    "batch": Verb("rescheduler.batch.batch:batch", "answer a file of requests in the background"),
    "replay": Verb("rescheduler.serving.replay:replay", "show a recorded log, or two of them"),
    "drain": Verb("rescheduler.serving.admin_client:drain", "drain an instance"),
    "ray": Verb("", "launch, see, restart or stop a deployment on a Ray cluster"),
    "ray launch": Verb(f"{_RAY}.launch_on_ray:launch", "start it"),
    "ray status": Verb(f"{_RAY}.launch_on_ray:status", "show what runs"),
    "ray restart": Verb(f"{_RAY}.launch_on_ray:restart", "restart its engines, one by one"),
    "ray stop": Verb(f"{_RAY}.launch_on_ray:stop", "stop it"),
    "profile": Verb("rescheduler.profiling.profile_command:profile", "measure step times"),
    "keys": Verb("predictor.live.zmq_sockets:keys", "create keys for telemetry between machines"),
    "rehearse": Verb(
        "rescheduler.demo.rehearse:rehearse", "serve a trace with emulated engines, without a GPU"
    ),
    "demo": Verb("rescheduler.demo.demo:demo", "compare a load with and without moves"),
    "advise": Verb("rescheduler.simulator.advice.advise:advise", "tell what a trace would gain"),
    "simulate": Verb("rescheduler.simulator.simulate:simulate", "compare policies and settings"),
    "record": Verb(
        "rescheduler.simulator.forecasts.record_forecasts:record",
        "record forecasts to simulate with",
    ),
    "papers": Verb("", "reproduce the papers' figures, tables and models"),
    "papers scaling": Verb(
        f"{_STUDIES}.scaling:scaling", "imbalance by workers and batches (BF-IO)"
    ),
    "papers barrier-tax": Verb(
        f"{_STUDIES}.barrier_tax:barrier_tax", "routing by models of a step's time"
    ),
    "papers rescheduling": Verb(
        f"{_STUDIES}.rescheduling:rescheduling", "migration planners (STAR)"
    ),
    "papers fairbatching": Verb(
        f"{_STUDIES}.fairbatching:fairbatching", "requests in time (FairBatching)"
    ),
    "papers train-router": Verb(
        "rescheduler.papers.jain_router.train_router:train_routers",
        "train routers, and compare them",
    ),
    "papers train-length": Verb(
        "rescheduler.papers.prompt_length.train_length:train_length", "predict lengths from prompts"
    ),
    "doctor": Verb("rescheduler.doctor.doctor:doctor", "check the installation, or an engine"),
}
"""What ``headway`` does: verbs, and verbs with a name that follows them."""

_TITLES = {"model": "Collect and train", "launch": "Serve", "advise": "Simulate", "doctor": "Check"}
"""What the help says above a verb."""

_HELP = ("-h", "--help", "help")
_VERSION = ("-V", "--version")

_USAGE = """\
usage: headway VERB [options]

Forecast how many tokens every running LLM request still has to generate.

{verbs}

A first round, on the embedded model:
  headway collect runs/demo --config configs/collect/quick.yaml
  headway train fit --config survival --data.dataset runs/demo
  headway evaluate runs/demo runs/survival

Routing policies on a simulated cluster:
  headway advise my_trace.csv
  headway simulate --config bfio_table1

Forecasts of a vLLM server that runs with Headway's worker (docs/observe.md):
  headway doctor --telemetry tcp://127.0.0.1:5557

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
    if verb not in (*_HELP, *_VERSION, *_following("")):
        return _unknown("headway", "verb", verb, _following(""))
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
    lines = []
    for name, verb in _following("").items():
        lines += ["", f"{_TITLES[name]}:"] if name in _TITLES else []
        lines.append(f"  {name:<14}{verb.text}")
    return _USAGE.format(verbs="\n".join(lines[1:]))


def _following(name: str) -> dict[str, Verb]:
    """Return the verbs, or those that may follow one."""
    start = f"{name} " if name else ""
    rest = {key.removeprefix(start): verb for key, verb in VERBS.items() if key.startswith(start)}
    return {key: verb for key, verb in rest.items() if " " not in key}


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
    name, rest = split_verb([verb, *rest])
    function, prog = VERBS[name].function, f"headway {name}"
    if not function:
        members = _following(name)
        if rest and rest[0] not in _HELP:
            return _unknown(prog, "name", rest[0], members)
        lines = [f"  {member:<14}{one.text}" for member, one in members.items()]
        print("\n".join([f"usage: {prog} NAME [options]", "", *lines]))
        return 0
    loaded = load_function(function)
    quieten_loggers(verbose="--verbose" in rest)
    if function == _LIGHTNING:  # which makes its own parser
        return loaded([name.removeprefix("train "), *rest])
    from rescheduler.commands.command_parser import run_command

    return run_command(loaded, rest, prog)


def split_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the key of `VERBS` that a command line begins with, and what follows it."""
    length = 2 if " ".join(words[:2]) in VERBS else 1
    return " ".join(words[:length]), list(words[length:])


def _unknown(prog: str, what: str, given: str, known: Mapping[str, Any]) -> int:
    near = get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    print(f"tip: For a list run: {prog} --help", file=sys.stderr)
    print(f"error: unknown {what} {given!r}{hint}", file=sys.stderr)
    return 2


def load_function(target: str) -> Callable[..., Any]:
    """Return what ``module:name`` names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
