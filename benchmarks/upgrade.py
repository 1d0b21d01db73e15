"""Every engine and the proxy of a deployment restarted in turn, while clients stream.

    python -m benchmarks.upgrade [--emulate MACHINE | --real] [--rounds 1] --json OUT

One prefill and two decode engines and their proxy run under `headway launch --serve`. Each of a few
questions is answered once in peace. Then clients ask them again and again while
`headway launch --upgrade` goes through the deployment. Each stream is compared with the answer in
peace. Questions are plain, seeded, with ``tools``, with ``n: 2`` and, where engines compute, with a
grammar. By default engines are emulated; with ``--real`` they are SmolLM2 in float32.

``cut``: streams that broke, had an error or no end. ``changed``: streams that said something else.
``answers_5xx`` and ``refused``: requests that got an error, or no connection. ``longest_pause_s``:
between two events of a stream, in seconds of the engines' own time.
"""

import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from benchmarks.equality.comparing import joined_chunks
from benchmarks.support.report import arguments, report
from benchmarks.support.stream_client import session
from rescheduler.emulation.emulate_options import EmulateOptions, read_machine
from rescheduler.emulation.scripted_answers import LENGTH, SEED
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_local import local_deployment, write_deployment
from rescheduler.openai.openai_stream import read_events

COUNTED = (
    *("streams", "cut", "changed", "answers_5xx", "answers_4xx", "refused", "moves"),
    "failed_upgrades",
)
"""What is counted: reported also where it is zero, since that is what most of it should be."""
KINDS = ("plain", "seeded", "tools", "n_2", "grammar")
_TEXTS = (
    "Once upon a time, in a small village by the sea, there lived a",
    "A short history of the bicycle begins in",
    "Dear Sir or Madam, I am writing to you because",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "advice": {"type": "string"}},
            "required": ["place", "advice"],
        },
    },
}
_DILATION = 4.0
_BEFORE_SECONDS = 5.0
_PARSER = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
_SAID = ("text", "content", "tool_calls", "finish_reason")

Choices = dict[int, dict[str, Any]]


class NoAnswerError(Exception):
    """A stream that is none; the message is the name under which it is counted."""


@dataclass
class Ledger:
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    longest_pause: float = 0.0
    notes: list[str] = field(default_factory=list)


def main() -> None:
    parser = arguments("every engine and the proxy restarted in turn, while clients stream")
    parser.add_argument("--emulate", metavar="MACHINE", default="h100-llama-8b")
    parser.add_argument("--real", action="store_true", help="SmolLM2 instead of emulated engines")
    parser.add_argument("--rounds", type=int, default=1, help="upgrades (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of who asks what (default: 1)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: must be a positive number")
    try:
        read_machine(options.emulate)
    except ValueError as error:
        parser.error(f"--emulate: {error}")
    machine = None if options.real else options.emulate
    ledger = Ledger()
    with tempfile.TemporaryDirectory() as folder:
        upgrades = Upgrades(Path(folder), machine, options.quick)
        with upgrades.launched():
            seconds = asyncio.run(upgrades.under_load(ledger, options.rounds, options.seed))
        ledger.counts["moves"] = upgrades.moves()
    for note in ledger.notes:
        print(note)
    figures = {name: float(count) for name, count in sorted(ledger.counts.items())}
    figures |= {"longest_pause_s": round(ledger.longest_pause, 3), "upgrade_s": round(seconds, 1)}
    command = " ".join(["python -m benchmarks.upgrade", *sys.argv[1:]])
    report("upgrade", figures, options.json, command=command)


class Upgrades:
    """A deployment of a launcher, and what asks it and upgrades it."""

    def __init__(self, folder: Path, machine: str | None, quick: bool) -> None:
        self._folder, self._emulated = folder, machine is not None
        self._file, self._logs = folder / "deployment.yaml", folder / "logs"
        self._at_once, questions = (10, 10) if self._emulated else (5, 10)
        self._questions = questions // 2 if quick else questions
        self._dilation = _DILATION if self._emulated else 1.0
        self._deployment = _deployment(machine)
        write_deployment(self._deployment, self._file)

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Run the engines and the proxy, until all that runs has ended."""
        command = [*self._command, "--serve", "--at-once", "2"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._launcher = process.pid
        try:
            assert process.stdout is not None
            while "Ctrl-C stops them" not in (line := process.stdout.readline()):
                if not line:
                    raise RuntimeError(f"the launcher ended with {process.wait()}")
            yield
        finally:
            process.terminate()
            process.communicate()

    @property
    def _command(self) -> list[str]:
        where = ["--config", str(self._file), "--logs", str(self._logs)]
        return [sys.executable, "-m", "rescheduler", "launch", *where]

    def servers(self) -> set[int]:
        """Return the processes of the engines and the proxy, each the first of its own."""
        children = Path(f"/proc/{self._launcher}/task/{self._launcher}/children").read_text()
        return set(map(int, children.split()))

    def moves(self) -> int:
        """Return how many requests have moved, by the proxies' log."""
        return len(re.findall(r": moved ", (self._logs / "proxy.log").read_text()))

    async def under_load(self, ledger: Ledger, rounds: int, seed: int) -> float:
        """Learn the answers, then ask while the deployment is upgraded; return how long it took."""
        generator, ended = random.Random(seed), asyncio.Event()
        async with session(self._deployment.proxy_url) as client:
            asked = [self._question(number) for number in range(self._questions)]
            expected = [await self._answer(client, body, ledger) for body in asked]
            ledger.longest_pause = 0.0
            print(f"{len(asked)} answers learnt", flush=True)

            async def ask() -> None:
                while not ended.is_set():
                    number = generator.randrange(len(asked))
                    ledger.counts["streams"] += 1
                    try:
                        choices = await self._answer(client, asked[number], ledger)
                    except NoAnswerError as error:
                        ledger.counts[error.args[0]] += 1
                        now = time.strftime("%H:%M:%S")
                        ledger.notes.append(f"{now} question {number}: {error}")
                        await asyncio.sleep(0.5)  # as a client that tries again
                        continue
                    if choices != expected[number]:
                        ledger.counts["changed"] += 1
                        other = f"{choices} instead of {expected[number]}"
                        ledger.notes.append(f"question {number}: {other}")

            clients = [asyncio.create_task(ask()) for _ in range(self._at_once)]
            await asyncio.sleep(_BEFORE_SECONDS)
            began = time.monotonic()
            for _ in range(rounds):
                upgrade = await asyncio.create_subprocess_exec(*self._command, "--upgrade")
                if await upgrade.wait() != 0:
                    ledger.notes.append("an upgrade failed")
                    ledger.counts["failed_upgrades"] += 1
            seconds = time.monotonic() - began
            ended.set()
            await asyncio.gather(*clients)
        return seconds

    def _question(self, number: int) -> dict[str, Any]:
        kinds = KINDS[:-1] if self._emulated else KINDS
        text = f"{number}. {_TEXTS[number % len(_TEXTS)]}"
        most = 300 + number * 97 % 600 if self._emulated else 80 + number * 37 % 80
        body: dict[str, Any] = {
            "model": self._deployment.served_name,
            "stream": True,
            "max_tokens": most,
            "temperature": 0,
        }
        if self._emulated:
            body["vllm_xargs"] = {LENGTH: most - 10, SEED: number}
        kind = kinds[number % len(kinds)]
        if kind == "tools":
            return body | {"messages": [{"role": "user", "content": text}], "tools": [_TOOL]}
        further: dict[str, dict[str, Any]] = {
            "plain": {},
            "seeded": {"temperature": 1.0, "seed": number},
            "n_2": {"temperature": 0.8, "seed": number, "n": 2},
            "grammar": {
                "temperature": 1.0,
                "seed": number,
                "structured_outputs": {"regex": "([a-z]{2,9} ){20}[a-z]{2,9}"},
            },
        }
        return body | {"prompt": text} | further[kind]

    async def _answer(
        self, client: aiohttp.ClientSession, body: dict[str, Any], ledger: Ledger
    ) -> Choices:
        """Return what a stream says, by choice; raises `NoAnswerError`."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        chunks: list[dict[str, Any]] = []
        last = 0.0
        try:
            async with client.post(path, json=body) as response:
                if response.status != 200:
                    kind = "answers_5xx" if response.status >= 500 else "answers_4xx"
                    raise NoAnswerError(kind, await response.text())
                async for chunk in read_events(response.content):
                    if "error" in chunk:
                        raise NoAnswerError("cut", str(chunk["error"]))
                    now = time.monotonic()
                    pause = (now - last) / self._dilation if last else 0.0
                    ledger.longest_pause, last = max(ledger.longest_pause, pause), now
                    chunks.append(chunk)
        except aiohttp.ClientConnectorError as error:
            raise NoAnswerError("refused", str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswerError("cut", f"{type(error).__name__}: {error}") from error
        choices: Choices = joined_chunks(chunks)["choices"]
        if len(choices) != body.get("n", 1) or not all(
            "finish_reason" in c for c in choices.values()
        ):
            raise NoAnswerError("cut", "no end")
        return {
            index: {key: choice[key] for key in _SAID if key in choice}
            for index, choice in choices.items()
        }


def _deployment(machine: str | None) -> Deployment:
    if machine is None:
        engine = EngineOptions(
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=16,
            kv_blocks=200,
            enforce_eager=True,
            arguments=_PARSER,
        )
        return local_deployment("smollm2", engine)
    engine = EngineOptions(
        max_model_len=4_096,
        max_num_seqs=64,
        block_size=16,
        kv_blocks=4_000,
        emulate=EmulateOptions(profile=machine, dilation=_DILATION),
        arguments=_PARSER,
    )
    deployment = local_deployment("smollm2", engine)
    # What happens is not dilated, and so is not what notices it.
    options = replace(
        deployment.proxy,
        probe_seconds=deployment.proxy.probe_seconds / _DILATION,
        breaker_seconds=deployment.proxy.breaker_seconds / _DILATION,
    )
    return replace(deployment, proxy=options)


if __name__ == "__main__":
    main()
