"""The parts in their order, and how they run: apart from each other, in a bounded time."""

import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from benchmarks.gpu_check import engine_parts, plain_pytorch
from benchmarks.gpu_check.findings import Findings, Here, NotRunError

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Part:
    """One thing to verify, in so many seconds at most."""

    check: Callable[[Findings, Here], None]
    seconds: float
    on_cpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)


class Outcome(msgspec.Struct, frozen=True):
    status: Status
    reason: str = ""
    measured: dict[str, float | str] = msgspec.field(default_factory=dict)


_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
_AVERAGED = {"layer": 20, "state_half_life": 8.0}
_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
_vectors = engine_parts.captured_vectors
PARTS = {
    "forecaster": Part(plain_pytorch.forecaster, 180, on_cpu=True),
    "vllm": Part(engine_parts.vllm_imports, 180, on_cpu=True),
    "replayed_capture": Part(plain_pytorch.replayed_capture, 120, on_cpu=True),
    "vectors_eager": Part(_vectors({"enforce_eager": True}), 300, on_cpu=True),
    "vectors_graphs": Part(_vectors({"async_scheduling": True}, "V2", "FULL_AND_PIECEWISE"), 600),
    "vectors_piecewise": Part(_vectors(_PIECEWISE, "V2", "PIECEWISE"), 600),
    "vectors_sync": Part(_vectors({"async_scheduling": False}, "V2"), 600),
    "vectors_stress": Part(_vectors(engine_parts.STRESS, "V2"), 600),
    "vectors_averaged": Part(_vectors(engine_parts.STRESS, "V2", captured=_AVERAGED), 600),
    "replayed_forecasts": Part(plain_pytorch.replayed_forecasts, 120, on_cpu=True),
    "live_forecasts": Part(engine_parts.live_forecasts, 600, True, _IN_PROCESS),
    "fair_batching": Part(engine_parts.fair_batching, 900, True, _IN_PROCESS),
    "migration": Part(engine_parts.migration, 1200),
    "vectors_v1": Part(_vectors({}, "V1"), 600, environment=_V1),
}
_EXACT_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee", "VLLM_FLOAT32_MATMUL_PRECISION": "highest"}
"""Kernels and matrix products in TF32 would let tokens depend on a batch's other requests."""
_ENDING_SECONDS = 60.0
_LOGS = Path("runs/gpu_check")
_PROCESS = {"spawn": SpawnProcess, "fork": ForkProcess}


def run_parts(
    names: Sequence[str],
    device: str,
    at_once: int = 1,
    context: Literal["spawn", "fork"] = "spawn",
) -> Generator[tuple[str, Outcome]]:
    """Run parts in their order, up to ``at_once`` at a time; yield each as it ends.

    Each has a process group of its own, of which nothing is left afterwards. A CUDA device
    needs the context ``spawn``.
    """
    waiting, running = list(names), dict[str, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                if device == "cpu" and not PARTS[name].on_cpu:
                    yield name, Outcome("not run", "needs a CUDA device")
                else:
                    running[name] = _start(name, device, context)
            left = min((one.deadline for one in running.values()), default=0.0) - time.monotonic()
            wait([one.process.sentinel for one in running.values()], timeout=max(0.0, left))
            for name, one in list(running.items()):
                late = one.process.is_alive()
                if late and time.monotonic() < one.deadline:
                    continue
                _end(one.process)
                del running[name]
                yield name, _outcome(name, one.process, late)
    finally:
        for one in running.values():
            _end(one.process)


class _Running(NamedTuple):
    process: SpawnProcess | ForkProcess
    deadline: float


def _start(name: str, device: str, context: Literal["spawn", "fork"]) -> _Running:
    folder = _LOGS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    process = _PROCESS[context](target=_check, args=(name, device))
    process.start()
    return _Running(process, time.monotonic() + PARTS[name].seconds)


def _outcome(name: str, process: SpawnProcess | ForkProcess, late: bool) -> Outcome:
    result, log = _LOGS / name / "outcome.json", _LOGS / name / "printed.log"
    if late:
        return Outcome("failed", f"took more than {PARTS[name].seconds:.0f} s; see {log}")
    if result.exists():
        return msgspec.json.decode(result.read_bytes(), type=Outcome)
    return Outcome("failed", f"ended with status {process.exitcode}; see {log}")


def _end(process: SpawnProcess | ForkProcess) -> None:
    """End a part and whatever it has started."""
    assert process.pid is not None
    if process.is_alive():
        process.terminate()  # engines in sessions of their own are stopped by whoever launched them
        process.join(_ENDING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _check(name: str, device: str) -> None:
    os.setsid()
    os.environ.update(_EXACT_FLOAT32 | PARTS[name].environment)
    torch.set_float32_matmul_precision("highest")  # images may set another
    folder = (_LOGS / name).resolve()
    with (folder / "printed.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    findings = Findings()
    try:
        PARTS[name].check(findings, Here(device, folder))
        failures = "; ".join(findings.failures)
        outcome = Outcome("failed" if failures else "passed", failures, findings.measured)
    except NotRunError as error:
        outcome = Outcome("not run", str(error))
    except BaseException as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}; see {_LOGS / name / 'printed.log'}"
        outcome = Outcome("failed", reason, findings.measured)
    written = folder / "outcome.part"
    written.write_bytes(msgspec.json.encode(outcome))
    written.rename(folder / "outcome.json")
