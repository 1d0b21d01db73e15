"""Everything that can go wrong, at random, while honest clients wait for their tokens.

    python -m benchmarks.chaos [--quick] [--minutes 30] [--seed 1] [--emulate MACHINE] --json OUT

One prefill and two decode instances of SmolLM2 in float32 with forecasts and keys, and
`headway serve`, each a process of its own. Honest clients (OpenAI's own library) ask questions
whose answers were learnt in peace. Meanwhile decode instances are drained in turns, so that
requests move all the time, and at random

- engines are killed (somebody else then publishes and answers nonsense in their place until they
  are started again), stopped by SIGSTOP, and filled up past the proxy,
- clients leave, stall in the middle of their headers, body or answer, and send poison,
- control sockets get nonsense, and the proxy is restarted,
- one engine records its hidden states to a disk that is full (where this may mount one).

With ``--emulate`` the engines are emulated ones: moves by the thousand in half an hour, of answers
that are scripted, without penalties and grammars. Then there are also, unless ``--no-slow``,
``--no-killers``, ``--no-silent`` or ``--no-overload`` says otherwise,

- engines whose steps take ten times as long for a while,
- requests that kill: the harness kills the engine of each as soon as the request runs there,
- silent streams, which ask for all of a long answer in a single event, half of them with tools,
- bursts of 130% of what all decode engines have places for, while steps take ten times as long.

The proxy waits for no token for longer than 10 seconds then, and stops are longer.

The table that it ends with:

- ``tokens_changed`` of honest answers, requests ``lost`` without a word, ``blocks_leaked`` once
  all is idle.
- ``honest_5xx`` while no engine was killed, ``honest_5xx_at_a_kill`` while one was. An engine that
  is stopped or slow excuses nothing. ``cut_by_proxy_restart`` were told so,
  ``refused_at_proxy_restart`` had not begun.
- ``loop_stall_ms``, the longest computation of the proxy's event loop at a stretch.
- ``living_out_of_service``: how often the proxy took an engine out of service that lived, and
  ``stopped_out_of_service``, those among them that were stopped; see `ledger.ServiceWatch` for the
  rule. ``recomputed_of_living`` and ``recomputed_after_deaths`` divide the requests that were
  computed again in the same way.
- ``killers_sent``; ``killers_refused_after_two``: that got a 422 after one or two engines;
  ``killers_beyond_two``: that took a third, after which the harness spares the others;
  ``engines_lost_to_killers``; ``innocents_lost``: honest requests that failed meanwhile, and
  ``refused_without_engines``, which had not begun while both decode engines were dead.
- ``silent_sent``, ``silent_ended`` with the right tokens, ``silent_failed`` with an error,
  ``silent_failed_at_a_kill`` of an engine, which those with tools do not survive,
  ``silent_without_end`` within 400 seconds, ``silent_cut_by_proxy_restart``.
- ``prompts_computed_twice``, as the proxy counts them; ``prompts_computed_twice_in_overloads``, as
  the decode engines count them: tokens of prompts that these compute, less what moves leave them
  to compute, by the mean prompt. Where a proxy does not count, the first is the second.
- ``slow_steps_times``: how many times as long slow steps took, as the engines log them.
"""

import argparse
import asyncio
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from benchmarks.chaos.chaos import KILLER, KINDS, OVERLOAD, SLOW, STOP, chaos
from benchmarks.chaos.harm import LOGS_REQUESTS, SETTING, Setting
from benchmarks.support.report import arguments, report
from predictor.live.zmq_sockets import create_keys
from rescheduler.emulation.emulate_options import EmulateOptions, read_machine
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment

_CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"
_DISK_BYTES = 256 << 10
_AT_ONCE = 20
"""Honest requests to emulated engines, which two cores can serve more of."""
_EMULATED = SETTING._replace(drained=(2.0, 4.0), first_token=20.0, token=10.0)
_SILENT_TOKENS = {True: 1_200, False: 900}
"""Of emulated engines, of 18 ms each at least, and of others: longer than the proxy waits."""
_MINUTES, _QUICK_MINUTES = 30.0, 2.0
_FURTHER = {
    "slow": "slow down engines",
    "killers": "send requests that kill",
    "silent": "ask for silent streams",
    "overload": "ask more at once than there is room for",
}
_COUNTED = {SLOW: "slowed", OVERLOAD: "overloads", KILLER: "killers_sent"}
_ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=16,
    kv_blocks=112,
    enforce_eager=True,
    checkpoint=str(_CHECKPOINT),
    k=10,
)


def main() -> None:
    options = _options()
    emulates = options.emulate is not None
    given = {SLOW: options.slow, OVERLOAD: options.overload, KILLER: options.killers}
    further = [kind for kind in given if given[kind]]
    kinds = tuple(dict.fromkeys([STOP, *further, *KINDS]))
    with tempfile.TemporaryDirectory() as folder, _full_disk(Path(folder) / "disk") as disk:
        keys = Path(folder) / "keys"
        create_keys(keys)
        engine = _ENGINE
        if emulates:
            engine = _emulated(options.emulate, options.dilation, Path(folder) / "steps")
        if options.killers:
            engine = msgspec.structs.replace(engine, arguments=[LOGS_REQUESTS])
        deployment = msgspec.structs.replace(local_deployment("smollm2", engine), keys=str(keys))
        if disk is not None and not emulates:
            deployment = _recording(deployment, disk)
        with launched(deployment, Path(folder) / "logs", at_once=2) as engines:
            ledger = asyncio.run(
                chaos(
                    engines,
                    deployment,
                    60 * options.minutes,
                    kinds,
                    at_once=_AT_ONCE if emulates else 12,
                    seed=options.seed,
                    at_least={_COUNTED[kind]: 1 for kind in further} if options.quick else {},
                    setting=_setting(options),
                )
            )
        for note in ledger.new_notes():
            print(note)
        ledger.counts["full_disks"] = int(disk is not None and not emulates)
        report("chaos", dict(sorted(ledger.counts.items())), options.json)


def _options() -> argparse.Namespace:
    parser = arguments("everything that can go wrong, at random")
    parser.add_argument("--minutes", type=float, help="how long (default: 30, or 2 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens when (default: 1)")
    parser.add_argument("--emulate", metavar="MACHINE", help="such as h100-llama-8b")
    parser.add_argument("--dilation", type=float, default=4.0, help="of emulated times (4)")
    for name, what in _FURTHER.items():
        text = f"{what} (default: with --emulate)"
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
    options = parser.parse_args()
    if options.emulate is not None:
        try:
            read_machine(options.emulate)
        except ValueError as error:
            parser.error(f"--emulate: {error}")
    if options.minutes is None:
        options.minutes = _QUICK_MINUTES if options.quick else _MINUTES
    for name in _FURTHER:
        if getattr(options, name) is None:
            setattr(options, name, options.emulate is not None)
    return options


def _setting(options: argparse.Namespace) -> Setting:
    emulates = options.emulate is not None
    setting = _EMULATED if emulates else SETTING
    if options.silent:
        setting = setting._replace(silent_streams=2, silent_tokens=_SILENT_TOKENS[emulates])
    if options.quick:
        setting = setting._replace(
            pause=(1.0, 2.0),
            stopped=(11.0, 14.0),
            slowed=(15.0, 15.0),
            overloaded=(40.0, 40.0),
            silent=240.0,
        )
    return setting


def _emulated(machine: str, dilation: float, steps: Path) -> EngineOptions:
    """Return engines each of which has room for all honest requests, so that they can move."""
    return msgspec.structs.replace(
        _ENGINE,
        checkpoint=None,
        max_model_len=2 * (_ENGINE.max_model_len or 0),
        max_num_seqs=2 * _ENGINE.max_num_seqs,
        kv_blocks=4 * (_ENGINE.kv_blocks or 0),
        emulate=EmulateOptions(profile=machine, dilation=dilation, logs=str(steps)),
    )


@contextmanager
def _full_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a disk that is soon full, where that is allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    mounted = False
    with suppress(OSError):
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def _recording(deployment: Deployment, disk: Path) -> Deployment:
    *others, last = deployment.instances
    section = {
        "k": deployment.engine.k,
        "record": {"path": str(disk / "dataset"), "flush_seconds": 1},
        "forecast": {
            "checkpoint": deployment.engine.checkpoint,
            "telemetry": {"bind": last.telemetry, "instance": last.name, "keys": deployment.keys},
        },
    }
    flag = ["--additional-config", json.dumps({"headway": section})]
    recording = msgspec.structs.replace(last, arguments=[*last.arguments, *flag])
    return msgspec.structs.replace(deployment, instances=[*others, recording])


if __name__ == "__main__":
    main()
