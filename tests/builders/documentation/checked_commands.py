"""Whether a command could be run: its verb, its options and the files of the repository in it."""

import argparse
import contextlib
import importlib
import importlib.util
import io
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from shown_commands import ROOT

from rescheduler.commands.command_line import load_function, main, split_verb
from rescheduler.commands.command_parser import command_arguments, command_parser, resolved
from rescheduler.commands.verbs import VERBS

UNCHECKED = ("curl", "docker", "envoy", "helm", "jupyter", "kind", "kubectl", "openssl",
             "prometheus", "promtool", "ray", "ssh")  # fmt: skip
"""Programs whose arguments nobody here knows: a page says who runs them, or why nobody does."""

LIGHTNING = ("train fit", "train validate", "train test")
"""Verbs whose options Lightning reads."""

_CHECKED = ("headway", "make", "pip", "python", "vllm")
VLLM = "vllm.entrypoints.openai.api_server"


def programs_of(command: str, folder: Path) -> list[list[str]]:
    """Return the programs, with arguments, that a shell would start for a command."""
    programs, log = folder / "programs", folder / "started"
    if not programs.exists():
        programs.mkdir()
        for name in (*UNCHECKED, *_CHECKED):
            (programs / name).write_text(
                f'#!/bin/sh\nfor word in {name} "$@"; do printf "%s\\0" "$word"; done >> {log}\n'
                f'printf "\\1\\0" >> {log}; echo shown\n'
            )
            (programs / name).chmod(0o755)
    log.write_bytes(b"")
    command = re.sub(r"^source \S+$", "true", command)  # what it does, `make install` shows
    done = subprocess.run(
        ["/bin/bash", "-euc", command],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    started = log.read_bytes().decode().split("\0\1\0")
    return [one.split("\0") for one in started if one]


def check_words(words: Sequence[str]) -> None:
    """Check one program and its arguments, in a folder with the files that they name."""
    program, rest = words[0], list(words[1:])
    if program == "headway":
        _check_headway(rest)
    elif program == "python" and rest[:1] == ["-m"]:
        _check_module(rest[1], rest[2:])
    elif program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = {word for word in rest if "=" not in word} - set(targets)
        assert not unknown, f"make has no {sorted(unknown)}"
    elif program == "pip":
        _check_extras(rest)
    elif "--" in rest and rest[rest.index("--") + 1] in _CHECKED:
        check_mention(rest[rest.index("--") + 1 :])  # its files are on another machine


def check_mention(words: Sequence[str]) -> None:
    """Check a command of which a text shows a part: its verb and the options it names."""
    if words[0] != "headway":
        partial = words[0] == "python" and words[2].startswith("benchmarks.")
        if not partial:
            check_words(words)
        else:
            named = set(re.findall(r"--[a-z-]+", " ".join(words[3:])))
            help = _accepted(words[2], _parse_module, words[2], ["--help"])
            unknown = named - set(re.findall(r"--[a-z-]+", help))
            assert not unknown, f"{words[2]} has no option {sorted(unknown)}"
        return
    rest = [re.sub(r"[,.:;)]+$", "", word) for word in words[1:]]
    if not rest or rest[0].startswith("-") or rest[0] in ("X", "VERB"):
        return
    verb, arguments = split_verb(rest)
    assert verb in VERBS, f"there is no verb {verb}"
    if verb in LIGHTNING:
        if "--config" in arguments and "X" not in " ".join(arguments):
            _check_headway([*rest, "--data.dataset", "dataset"])
        return
    if not VERBS[verb].function:
        assert not arguments or not arguments[0].isidentifier(), f"{verb} has no {arguments[0]}"
        return
    parser = command_parser(load_function(VERBS[verb].function), verb)
    options = [*parser._option_string_actions, "--print-config", "--print_config"]
    for word in arguments:
        if word.startswith("--") and word != "--":
            option = resolved(parser, word.partition("=")[0])[0]
            known = any(option == one or option.startswith(f"{one}.") for one in options)
            assert known, f"headway {verb} has no option {word}"
        if re.fullmatch(r"(configs|checkpoints|docs|deploy)/\S+", word):
            assert Path(word).exists(), f"{word} does not exist"


def _accepted(shown: str, parse: Callable[..., object], *arguments: object) -> str:
    """Have a program read its arguments, and return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            parse(*arguments)
        except SystemExit as end:
            assert not end.code, f"{shown}\n{printed.getvalue()}"
    return printed.getvalue()


def _check_headway(words: list[str]) -> None:
    _accepted(f"headway {' '.join(words)}", _parse_headway, words)


def _parse_headway(words: list[str]) -> None:
    verb, rest = split_verb(words)
    if verb.startswith("-"):
        assert verb in ("--help", "--version"), f"headway has no option {verb}"
    elif verb in LIGHTNING:
        main([*words, "--print-config"])
    else:
        assert verb in VERBS and VERBS[verb].function, f"there is no verb {' '.join(words[:2])}"
        command_arguments(load_function(VERBS[verb].function), rest, f"headway {verb}")


class _ParsedError(Exception):
    """Ends a program once it has read its arguments."""


def _check_module(name: str, arguments: list[str]) -> None:
    if name == VLLM:
        return  # tests/integration/test_shown_engines.py has vLLM read them
    assert importlib.util.find_spec(name), f"there is no module {name}"
    if name.startswith("benchmarks."):
        _accepted(f"python -m {name} {' '.join(arguments)}", _parse_module, name, arguments)


def _parse_module(name: str, arguments: list[str]) -> None:
    package = (ROOT / name.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{name}.__main__" if package else name)
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise _ParsedError

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_ParsedError):
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        module.main()


def _check_extras(arguments: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:\.|headway)\[([\w,]+)\]", " ".join(arguments)):
        unknown = set(extras.split(",")) - set(known["optional-dependencies"])
        assert not unknown, f"Headway has no extra {sorted(unknown)}"


def exit_status(*arguments: str | Path) -> int:
    """Return the exit status of the command line."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:  # jsonargparse ends the process itself
        return int(end.code or 0)


def command_for(config: Path) -> list[str]:
    """Return the verb that a file of `configs/` is for, and its required arguments."""
    if config.parent.name == "serve":
        return ["serve"]
    if config.parent.name == "collect":
        return ["collect", "out"]
    if config.parent.name == "prompt_length":
        return ["papers", "train-length", "dataset", "prompts"]
    if config.name.startswith("evaluate"):
        return ["evaluate", "dataset", "checkpoint"]
    if config.parent.name == "predictor":
        return ["train", "fit", "--data.dataset", "dataset"]
    words = config.read_text().partition("headway ")[2].split()  # as its first lines say
    arguments = words[: words.index("--config")]
    return arguments if arguments == ["simulate"] else [*arguments, "--out", "out"]
