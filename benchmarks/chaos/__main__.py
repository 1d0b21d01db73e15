"""Everything that can go wrong, at random, while honest clients wait for their tokens.

    python -m benchmarks.chaos [--minutes 30] [--seed 1] [--emulate MACHINE] --json OUT

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
that are scripted, without penalties and grammars.

The table that it ends with: ``tokens_changed`` of honest answers, requests ``lost`` without a
word, ``blocks_leaked`` once all is idle, ``honest_5xx`` while an engine was healthy (and
``honest_5xx_at_a_kill``: while one was killed or stopped; ``cut_by_proxy_restart`` were told so,
``refused_at_proxy_restart`` had not begun),
and ``loop_stall_ms``, the longest computation of the proxy's event loop at a stretch.
"""

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from benchmarks.chaos.chaos import chaos
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
    parser = arguments("everything that can go wrong, at random", quick=False)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens when (default: 1)")
    parser.add_argument("--emulate", metavar="MACHINE", help="such as h100-llama-8b")
    parser.add_argument("--dilation", type=float, default=4.0, help="of emulated times (4)")
    options = parser.parse_args()
    if options.emulate is not None:
        try:
            read_machine(options.emulate)
        except ValueError as error:
            parser.error(f"--emulate: {error}")
    with tempfile.TemporaryDirectory() as folder, _full_disk(Path(folder) / "disk") as disk:
        keys = Path(folder) / "keys"
        create_keys(keys)
        engine = _ENGINE
        if options.emulate is not None:
            engine = _emulated(options.emulate, options.dilation)
        deployment = msgspec.structs.replace(local_deployment("smollm2", engine), keys=str(keys))
        if disk is not None and engine.emulate is None:
            deployment = _recording(deployment, disk)
        with launched(deployment, Path(folder) / "logs", at_once=2) as engines:
            seconds, at_once = 60 * options.minutes, 12 if options.emulate is None else _AT_ONCE
            ledger = asyncio.run(
                chaos(engines, deployment, seconds, at_once=at_once, seed=options.seed)
            )
        for note in ledger.notes:
            print(note)
        ledger.counts["full_disks"] = int(disk is not None and engine.emulate is None)
        report("chaos", dict(sorted(ledger.counts.items())), options.json)


def _emulated(machine: str, dilation: float) -> EngineOptions:
    """Return engines each of which has room for all honest requests, so that they can move."""
    return msgspec.structs.replace(
        _ENGINE,
        checkpoint=None,
        max_num_seqs=2 * _ENGINE.max_num_seqs,
        kv_blocks=2 * (_ENGINE.kv_blocks or 0),
        emulate=EmulateOptions(profile=machine, dilation=dilation),
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
