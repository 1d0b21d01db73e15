"""Drive prompts through a vLLM engine that captures, and show the progress."""

import asyncio
import signal
import time
from typing import Any

from tqdm import tqdm

from data_collection.dataset.dataset_schema import shown
from data_collection.vllm_adapter.engine import (
    AsyncLLM,
    EngineDeadError,
    answered_tokens,
    start_engine,
)
from data_collection.workload.arrivals import Arrivals, arrival_times
from data_collection.workload.engine_options import Terminal, last_lines
from data_collection.workload.engine_requests import EngineRequest, RequestSource
from data_collection.workload.prompts import PromptError

_STATUS_SECONDS = 1.0
_SCREEN_SECONDS, _LINE_SECONDS = 0.1, 10.0


class CollectionError(RuntimeError):
    """A collection ended early; the message says what is kept and what was lost."""


def drive(
    source: RequestSource,
    engine_arguments: dict[str, Any],
    arrivals: Arrivals,
    terminal: Terminal,
) -> int:
    """Run every request once; return how many answers ended, once the engine has, too.

    Raises:
        CollectionError: Ctrl-C, the engine died or did not start, or recording failed.
        PromptError: no prompt fits the model.
    """
    driven = _Drive(arrivals, terminal)
    asyncio.run(driven.run(source, engine_arguments))
    return driven.ended


class _Drive:
    """One run over the requests: counts, progress bar and the reasons to stop."""

    def __init__(self, arrivals: Arrivals, terminal: Terminal) -> None:
        self.ended = 0
        self._terminal = terminal
        self._arrivals = arrivals
        self._tokens = 0
        self._in_flight: set[str] = set()
        self._status: dict[str, Any] = {}
        self._bar: tqdm[Any] | None = None

    async def run(self, source: RequestSource, engine_arguments: dict[str, Any]) -> None:
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            engine = start_engine(engine_arguments)
        except (RuntimeError, ValueError) as error:
            raise CollectionError(
                f"the engine did not start: {error}{last_lines(self._terminal.log)}"
            ) from error
        loop.add_signal_handler(signal.SIGINT, interrupted.set)
        try:
            requests = self._that_fit(engine, source(engine.get_tokenizer()))
            with tqdm(
                total=len(requests),
                unit="request",
                dynamic_ncols=True,
                file=self._terminal.err,
                mininterval=_SCREEN_SECONDS if self._terminal.err.isatty() else _LINE_SECONDS,
            ) as self._bar:
                tasks: list[asyncio.Task[Any]] = [
                    asyncio.create_task(self._send_all(engine, requests)),
                    asyncio.create_task(self._watch(engine)),
                    asyncio.create_task(interrupted.wait()),
                ]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                lost = len(self._in_flight)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if interrupted.is_set():
                    raise CollectionError(
                        f"interrupted: {lost} running requests were cut and are kept as censored "
                        "rows; run the same command again to resume"
                    )
                for task in done:
                    task.result()
        except EngineDeadError as error:
            raise CollectionError(
                f"the engine died: the rows of {len(self._in_flight)} running requests and of "
                "those that ended in the last seconds are lost; run the same command again to "
                f"resume{last_lines(self._terminal.log)}"
            ) from error
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            engine.shutdown()

    def _that_fit(self, engine: AsyncLLM, requests: list[EngineRequest]) -> list[EngineRequest]:
        """Leave out, by name, what does not fit the model."""
        longest = engine.model_config.max_model_len
        too_long = [one for one in requests if len(one.token_ids) >= longest]
        if too_long:
            named = ", ".join(
                f"{shown(one.name)} ({len(one.token_ids)} tokens)" for one in too_long[:5]
            )
            message = (
                f"{len(too_long)} prompts are longer than the model's {longest} tokens and left "
                f"out: {named}{' ...' if len(too_long) > 5 else ''}"
            )
            if len(too_long) == len(requests):
                raise PromptError(message)
            print(message, file=self._terminal.err)
        return [one for one in requests if len(one.token_ids) < longest]

    async def _send_all(self, engine: AsyncLLM, requests: list[EngineRequest]) -> None:
        """Start every request when it arrives and a place is free; return when all ended."""
        places = asyncio.Semaphore(self._arrivals.concurrency)
        started = time.monotonic()

        async def send(index: int, request: EngineRequest) -> None:
            try:
                await self._send(engine, index, request)
            finally:
                places.release()

        try:
            async with asyncio.TaskGroup() as group:
                arriving = arrival_times(self._arrivals)
                for index, request in enumerate(requests):
                    arrival = next(arriving, None)
                    if arrival is None:
                        left = len(requests) - index
                        print(
                            f"the trace has no more arrivals: {left} prompts left",
                            file=self._terminal.err,
                        )
                        break
                    await asyncio.sleep(max(0.0, started + arrival - time.monotonic()))
                    await places.acquire()
                    group.create_task(send(index, request))
        except ExceptionGroup as failures:  # the first says what happened
            raise failures.exceptions[0] from None

    async def _send(self, engine: AsyncLLM, index: int, request: EngineRequest) -> None:
        self._in_flight.add(request.id)
        settings = request.sampling
        sampling = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            "n": settings.n,
            "seed": None if settings.seed is None else settings.seed + index,
            "extra_args": request.extra_args,
        }
        async for tokens in answered_tokens(engine, request.id, request.token_ids, sampling):
            self._tokens += tokens
        self._in_flight.discard(request.id)
        self.ended += settings.n
        assert self._bar is not None
        self._bar.update()

    async def _watch(self, engine: AsyncLLM) -> None:
        """Show the recorder's counts every second; fail when it cannot write."""
        tokens, then = self._tokens, time.monotonic()
        while True:
            await asyncio.sleep(_STATUS_SECONDS)
            replies = await engine.collective_rpc("headway_status")
            self._status = next(reply for reply in replies if reply["recording"])
            now = time.monotonic()
            if self._bar is not None:
                rate = (self._tokens - tokens) / (now - then)
                lost = (
                    f"{self._status.get(f'{how}_rows', 0)} {how}" for how in ("dropped", "refused")
                )
                shown = [f"{self._status['rows']} rows, {rate:.0f} tokens/s"]
                shown += [count for count in lost if not count.startswith("0 ")]
                self._bar.set_postfix_str(", ".join(shown), refresh=self._terminal.err.isatty())
            tokens, then = self._tokens, now
            if self._status["error"]:
                raise CollectionError(
                    f"recording failed: {self._status['error']}. The shards written so far are a "
                    f"valid dataset; {self._status['unwritten_rows']} rows could not be written. "
                    "Fix the cause and run the same command again to resume"
                )
