"""The command ``headway``: one verb per task, every verb with YAML and overrides."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

from rescheduler.commands.event_loop import escaped, quieten, quieten_loggers
from rescheduler.commands.verbs import GROUPS, VERBS, following

_LIGHTNING = VERBS["train fit"].function

_HELP = ("-h", "--help", "help")
_VERSION = ("-V", "--version")

_USAGE = """\
usage: headway VERB [options]

Predict how many tokens each running LLM request still has to generate, and schedule vLLM by it.

{verbs}

What would your traffic gain? Then a first round with the embedded model:
  headway advise examples/trace.csv --instances 4 --slots 32 --requests 2000
  headway collect runs/demo --config collect/quick
  headway train fit --config survival --data.dataset runs/demo --out runs/predictor
  headway evaluate runs/demo runs/predictor

A deployment on this machine, with emulated GPUs or real engines:
  headway launch --config local-pd --emulate h100-llama-8b --serve
  headway launch --config local-pd --serve

`headway VERB --help` shows an example. Every verb takes --config FILE.yaml, --print-config and
--verbose. `headway --version` prints the version.
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
    if verb not in (*_HELP, *_VERSION, *following("")):
        return _unknown("headway", "verb", verb, following(""))
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
        name = split_verb([verb, *rest])[0]
        print(escaped(f"headway {name}: {_said(error)}"), file=sys.stderr)
        return 1
    return int(result or 0)


def _said(error: Exception) -> str:
    """Return what an error says, with the file in front where the system names one."""
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str | Path):
        return f"{error.filename}: no such file or folder"
    return str(error)


def _usage() -> str:
    lines = []
    for name, verb in following("").items():
        lines += ["", f"{GROUPS[name]}:"] if name in GROUPS else []
        lines.append(f"  {name:<14}{verb.text}")
    return _USAGE.format(verbs="\n".join(lines[1:]))


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
        members = following(name)
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
    if what == "name" and not near:
        hint = f"; one of {', '.join(known)}"
    print(f"tip: For a list run: {prog} --help", file=sys.stderr)
    print(f"error: unknown {what} {given!r}{hint}", file=sys.stderr)
    return 2


def load_function(target: str) -> Callable[..., Any]:
    """Return what ``module:name`` names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
