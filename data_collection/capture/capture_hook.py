"""Which rows of a step to capture, and who receives them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch

from data_collection.capture.averaged_states import AveragedStates
from data_collection.capture.requests import FinishedRequest

Cadence = Literal["request", "step"]
"""When rows are captured: whenever a request's own n is a multiple of k; or of every running
request together on each k-th engine step. Both capture the end of every prefill, n = 0."""


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """The rows captured in one engine step, as a struct of arrays.

    Attributes:
        step: number of the engine step since the worker was armed.
        request_ids: [n_rows] ids inside the engine; the other lists are as long.
        generated_tokens: before this step's sample.
        max_tokens: the cap each request asked for; 0 when unknown.
        adapters: names of their LoRA adapters; "" for the base model.
        hidden_states: [n_rows, d] last token's, of the layer that is captured, in the model's
            dtype; or averaged over the answer, in float32 (`AveragedStates`). On the engine's
            device. A copy: it may be kept.
    """

    step: int
    request_ids: list[str]
    prompt_tokens: list[int]
    generated_tokens: list[int]
    max_tokens: list[int]
    temperatures: list[float]
    adapters: list[str]
    hidden_states: torch.Tensor

    def of_adapter(self, name: str) -> "CapturedRows":
        """Return the rows of requests with an adapter."""
        kept = [i for i, adapter in enumerate(self.adapters) if adapter == name]
        if len(kept) == len(self.adapters):
            return self
        lists = {
            field.name: [getattr(self, field.name)[i] for i in kept]
            for field in fields(self)
            if field.name not in ("step", "hidden_states")
        }
        return CapturedRows(step=self.step, hidden_states=self.hidden_states[kept], **lists)


class RowConsumer(Protocol):
    """Something that wants the captured rows: a recorder, a forecaster.

    Its methods are called on the engine's thread and must return at once.
    """

    cadence: Cadence

    def on_rows(self, rows: CapturedRows) -> None:
        """Take the rows of one step."""

    def on_finished(self, finished: list[FinishedRequest]) -> None:
        """Take the requests that ended; their last rows have been handed on before."""

    def close(self) -> None:
        """Write out what is held; the engine stops."""


Gather = Callable[[list[int], list[int]], torch.Tensor]
"""Copies the hidden states [n_rows, d] of positions in the batch, each so many tokens behind the
last token that the step computed of it."""


@dataclass(frozen=True, slots=True)
class _Known:
    prompt_tokens: int
    max_tokens: int
    temperature: float
    is_replay: bool
    adapter: str


@dataclass(frozen=True, slots=True)
class _Due:
    """The rows n that are due of a request whose step ends at ``last`` generated tokens."""

    rows: range
    last: int


class CaptureHook:
    """Select the rows that are due and hand them to the consumers, on the engine's thread.

    With c tokens computed before a step, s scheduled in it and a prompt of p tokens, a
    request stands at n = c + s - p generated tokens when the step's forward pass is done.
    Its row is the last token's only if c + s reaches everything known of the request:
    otherwise the step is one part of a chunked prefill, or of a recomputation after
    preemption, and the row belongs to a token in the middle. A row is due at n = 0, the end of
    prefill, and then when n is a multiple of k, or in every k-th step of the engine, as the
    consumer's cadence says. Of a replay, whose answer is part of what is prefilled, every n in
    the step is the row of a token that is known, and all multiples of k are due.

    Args:
        k: tokens, or steps, between two captured rows of a request.
        consumers: receive every row of their cadence and every finished request.
        generated: kept up to date with n of every request that has been prefilled and has not
            ended; for consumers that want to look at any time.
        averages: what rows are, in place of the last token's states.
    """

    def __init__(
        self,
        k: int,
        consumers: Sequence[RowConsumer],
        generated: dict[str, int] | None = None,
        averages: AveragedStates | None = None,
    ) -> None:
        self.k = k
        self.consumers = tuple(consumers)
        self.steps = 0
        self._generated = {} if generated is None else generated
        self._requests: dict[str, _Known] = {}
        self._averages = averages
        self._computed: dict[str, int] = {}
        cadences = {consumer.cadence for consumer in self.consumers}
        self._due: dict[Cadence, dict[str, _Due]] = {cadence: {} for cadence in sorted(cadences)}

    def request_added(
        self,
        request_id: str,
        prompt_tokens: int,
        max_tokens: int,
        temperature: float = 1.0,
        is_replay: bool = False,
        adapter: str = "",
    ) -> None:
        """Learn of a request, before its first `request_scheduled`."""
        known = _Known(prompt_tokens, max_tokens, temperature, is_replay, adapter)
        self._requests[request_id] = known

    def request_scheduled(self, request_id: str, computed: int, scheduled: int, known: int) -> None:
        """Note a request of this step, and whether its row is due.

        Args:
            request_id: learnt of by `request_added`.
            computed: tokens whose KV was there before the step.
            scheduled: tokens of this step.
            known: generated tokens that existed when the step was scheduled.
        """
        request = self._requests[request_id]
        n = computed + scheduled - request.prompt_tokens
        if request.is_replay:
            first = max(n - scheduled + 1, 0)
            if self._averages is not None:
                self._note_computed(self._averages, request_id, range(first, n + 1))
            multiples = range(-(-first // self.k) * self.k, n + 1, self.k)
            if multiples and "request" in self._due:
                self._due["request"][request_id] = _Due(multiples, n)
            return
        if n < known or n < 0:
            return
        if self._averages is not None and (n == 0 or n > self._generated.get(request_id, -1)):
            self._note_computed(self._averages, request_id, range(n, n + 1))
        self._generated[request_id] = n
        for cadence, due in self._due.items():
            count = n if cadence == "request" else self.steps + 1
            if n == 0 or count % self.k == 0:
                due[request_id] = _Due(range(n, n + 1), n)

    def _note_computed(self, averages: AveragedStates, request_id: str, tokens: range) -> None:
        """Note which tokens of an answer the step computes, of which averages are made."""
        if tokens:
            if tokens.start == 0:
                averages.forget([request_id])
            self._computed[request_id] = len(tokens)

    def step_done(
        self,
        batch_request_ids: Sequence[str],
        gather: Gather,
        finished: list[FinishedRequest],
    ) -> None:
        """Hand on the due rows of a batch, and the requests that ended before its step."""
        self.steps += 1
        if finished:
            for consumer in self.consumers:
                consumer.on_finished(finished)
            for request in finished:
                self._requests.pop(request.request_id, None)
                self._generated.pop(request.request_id, None)
            if self._averages is not None:
                self._averages.forget([request.request_id for request in finished])
        if self._averages is not None:
            gather = self._averaged(self._averages, batch_request_ids, gather)
        for cadence, due in self._due.items():
            if due:
                rows = self._rows(due, batch_request_ids, gather)
                due.clear()
                for consumer in self.consumers:
                    if consumer.cadence == cadence:
                        consumer.on_rows(rows)

    def _averaged(
        self, averages: AveragedStates, batch_request_ids: Sequence[str], gather: Gather
    ) -> Gather:
        """Add the step's states to the averages, and return what copies rows of these."""
        places = [i for i, name in enumerate(batch_request_ids) if name in self._computed]
        single = [i for i in places if self._computed[batch_request_ids[i]] == 1]
        if single:
            names = [batch_request_ids[i] for i in single]
            averages.add(names, gather(single, [0] * len(single)))
        replays: dict[str, torch.Tensor] = {}
        for i in places:
            name = batch_request_ids[i]
            n = self._computed[name]
            if n > 1:
                states = gather([i] * n, list(range(n - 1, -1, -1)))
                replays[name] = averages.extend(name, states)
        self._computed.clear()

        def rows(positions: list[int], behind: list[int]) -> torch.Tensor:
            names = [batch_request_ids[i] for i in positions]
            if not replays:
                return averages.read(names)
            return torch.stack(
                [
                    replays[name][-1 - i] if name in replays else averages.read([name])[0]
                    for name, i in zip(names, behind, strict=True)
                ]
            )

        return rows

    def _rows(
        self,
        due: dict[str, _Due],
        batch_request_ids: Sequence[str],
        gather: Gather,
    ) -> CapturedRows:
        rows = [
            (i, name, n)
            for i, name in enumerate(batch_request_ids)
            if name in due
            for n in due[name].rows
        ]
        known = [self._requests[name] for _, name, _ in rows]
        return CapturedRows(
            step=self.steps,
            request_ids=[name for _, name, _ in rows],
            prompt_tokens=[request.prompt_tokens for request in known],
            generated_tokens=[n for _, _, n in rows],
            max_tokens=[request.max_tokens for request in known],
            temperatures=[request.temperature for request in known],
            adapters=[request.adapter for request in known],
            hidden_states=gather(
                [i for i, _, _ in rows], [due[name].last - n for _, name, n in rows]
            ),
        )

    def close(self) -> None:
        """Close every consumer, also when one of them fails."""
        errors = []
        for consumer in self.consumers:
            try:
                consumer.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("closing the capture hook", errors)
