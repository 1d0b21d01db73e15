"""Batches for emulated engines: their files, `headway batch` as a process, and what it got."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.support.deployments import POLL_SECONDS, StalledError, proxy_process
from rescheduler.demo.scripted_load import (
    MAX_TOKENS,
    EmulatedAnswer,
    EmulatedRequest,
    asked_body,
    changed_answers,
)
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_engines import Launched
from rescheduler.engines.launch_process import ServerProcess

_PATIENCE = 900.0


def write_batch(
    path: Path, model: str, load: Sequence[EmulatedRequest], salt: int, **fields: Any
) -> None:
    """Write a batch of scripted requests; the fields are added to the body of each."""
    with path.open("w") as file:
        for request in load:
            line = {
                "custom_id": str(request.seed),
                "method": "POST",
                "url": "/v1/completions",
                "body": asked_body(model, request, salt, MAX_TOKENS) | fields,
            }
            file.write(json.dumps(line) + "\n")


@contextmanager
def batch_process(
    file: Path, out: Path, url: str, concurrency: int
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run `headway batch`; at the end, interrupt it if it still runs."""
    command = [sys.executable, "-m", "rescheduler", "batch", str(file), "--out", str(out)]
    command += ["--url", url, "--concurrency", str(concurrency)]
    with out.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def answered_tokens(out: Path) -> list[int]:
    """Return the tokens of each answer that a batch has so far."""
    if not out.exists():
        return []
    whole = [line for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in whole]


class KilledBatch(NamedTuple):
    """A batch in the middle of which a proxy, an engine and the batch itself were killed.

    ``lost`` requests have no answer, ``repeated`` ones have several, ``errors`` are final, and
    ``changed`` answers are not what was asked for.
    """

    requests: int
    answered: int
    lost: int
    repeated: int
    errors: int
    changed: int
    seconds: float


def killed_batch(
    deployment: Deployment,
    engines: Launched,
    load: Sequence[EmulatedRequest],
    folder: Path,
    concurrency: int,
) -> KilledBatch:
    """Run a batch on engines that run; kill -9 the proxy, an engine, and the batch, in turn.

    The first two after a quarter and the half of the answers, and each starts again.

    Raises:
        StalledError: no answer comes for a quarter of an hour.
        RuntimeError: the batch ended otherwise than with all of its answers.
    """
    file, out = folder / "asked.jsonl", folder / "answers.jsonl"
    write_batch(file, deployment.served_name, load, salt=0)
    server = proxy_process(deployment, folder, "--verbose")
    began = time.monotonic()
    try:
        _started(server)
        with batch_process(file, out, deployment.proxy_url, concurrency) as process:
            _until_answered(out, len(load) // 4, process)
            server.kill()
            _started(server)
            _until_answered(out, len(load) // 2, process)
            victim = deployment.decode[-1].name
            engines.kill(victim)
            engines.start([victim])
        with batch_process(file, out, deployment.proxy_url, concurrency) as process:
            _until_answered(out, 3 * len(load) // 4, process)
            process.send_signal(signal.SIGKILL)
        with batch_process(file, out, deployment.proxy_url, concurrency) as process:
            _until(lambda: process.poll() is not None)
            if process.returncode:
                raise _ended(out)
    finally:
        server.signal(signal.SIGTERM)
        server.end_by(time.monotonic() + 30.0)
    return _judged(deployment, load, out, time.monotonic() - began)


def _judged(
    deployment: Deployment, load: Sequence[EmulatedRequest], out: Path, seconds: float
) -> KilledBatch:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    times = Counter(line["custom_id"] for line in lines)
    asked = {str(request.seed): request for request in load}
    answers = []
    for line in lines:
        body = line["response"]["body"]
        tokens, text = body["usage"]["completion_tokens"], body["choices"][0]["text"]
        answers.append(EmulatedAnswer(asked[line["custom_id"]], tokens=tokens, text=text))
    errors = out.with_name("answers.errors.jsonl").read_text().splitlines()
    return KilledBatch(
        requests=len(load),
        answered=len(times),
        lost=len(asked.keys() - times.keys()),
        repeated=sum(count > 1 for count in times.values()),
        errors=len(errors),
        changed=changed_answers(answers, Path(model_to_load(deployment))),
        seconds=seconds,
    )


def _started(server: ServerProcess) -> None:
    server.start()
    _until(server.is_ready)


def _until_answered(out: Path, answers: int, process: "subprocess.Popen[bytes]") -> None:
    def answered() -> bool:
        if process.poll() is not None:
            raise _ended(out)
        return len(answered_tokens(out)) >= answers

    _until(answered)


def _ended(out: Path) -> RuntimeError:
    return RuntimeError(f"the batch has ended: {out.with_suffix('.log').read_text()}")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise StalledError("the batch goes no further")
        time.sleep(POLL_SECONDS)
