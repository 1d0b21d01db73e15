"""`headway launch`: start a deployment's engines on this machine, and stop them cleanly."""

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from data_collection.models import resolve_model
from rescheduler.engines.deployment import Deployment, read_deployment
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_checks import LaunchError, cpu_interpreter
from rescheduler.engines.launch_engines import Launched, chosen, launched
from rescheduler.engines.launch_progress import LaunchProgress

__all__ = ["launch"]

_WATCH_SECONDS = 0.5

_DESCRIPTION = """\
Start the engines of a deployment on this machine and stay in the foreground.

Each engine becomes a process group of its own and writes a log. Ctrl-C, SIGTERM and a closed
terminal stop them all. An engine that ends by itself is reported, and the others go on.
Exit status: 0 stopped as asked, 130 the same while engines still load, 1 an engine ended.
"""


def launch(arguments: list[str]) -> int:
    """Run ``headway launch`` with these arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="headway launch",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="the deployment, a YAML file")
    parser.add_argument(
        "--print", action="store_true", dest="only_print", help="show the commands, start nothing"
    )
    parser.add_argument(
        "--logs", type=Path, default=Path("runs/launch"), help="folder of the logs (%(default)s)"
    )
    parser.add_argument("--serve", action="store_true", help="start the proxy as well")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these instances, not all"
    )
    parser.add_argument(
        "--at-once", type=_positive, metavar="N", help="load so many at a time, not all"
    )
    options = parser.parse_args(arguments)
    deployment = read_deployment(options.config)
    if options.only_print:
        print(_commands(deployment, options.only))
        return 0
    serve = options.config if options.serve else None
    with ExitStack() as stack:
        progress = stack.enter_context(LaunchProgress(options.logs))
        running = stack.enter_context(
            launched(deployment, options.logs, options.only, serve, progress.tell, options.at_once)
        )
        progress.finish()
        print(_summary(running, options.config, options.serve), flush=True)
        return _watch(running)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _commands(deployment: Deployment, only: list[str]) -> str:
    """Return what would be started, for a shell."""
    model, python = resolve_model(deployment.model), cpu_interpreter()
    return "\n\n".join(
        f"# {instance.name}, {instance.role}\n"
        + engine_command(deployment, instance, model, python).shell()
        for instance in chosen(deployment, only)
    )


def _summary(running: Launched, config: Path, serve: bool) -> str:
    deployment = running.deployment
    if serve:
        body = f'{{"model": "{deployment.served_name}", "prompt": "Once", "max_tokens": 32}}'
        how = (
            f"clients use {deployment.proxy_url}/v1, for example:\n"
            f"  curl {deployment.proxy_url}/v1/completions \\\n"
            f"    -H 'Content-Type: application/json' -d '{body}'"
        )
    else:
        how = f"start the proxy with: headway serve --config {config}"
    return f"{', '.join(running.servers)}: ready, logs in {running.logs}\n{how}\nCtrl-C stops them"


def _watch(running: Launched) -> int:
    """Report what ends until all has, or until asked to stop; return the exit status.

    Raises:
        LaunchError: the proxy or the last engine ended.
    """
    status = 0
    try:
        while True:
            for server in running.take_ended():
                status = 1
                if server.name == "proxy" or not running.is_running:
                    raise LaunchError(server.why_it_ended())
                print(f"headway launch: {server.why_it_ended()}", file=sys.stderr, flush=True)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return status
