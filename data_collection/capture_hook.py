"""Which rows of a step to capture, and who receives them."""

from collections.abc import Callable, Sequence

import torch

from data_collection.captured_rows import CapturedRows, FinishedRequest, RowConsumer

__all__ = ["CaptureHook"]


class CaptureHook:
    """Select the rows that are due and hand them to the consumers, on the engine's thread.

    With c tokens computed before a step, s scheduled in it and a prompt of p tokens, a
    request stands at n = c + s - p generated tokens when the step's forward pass is done.
    Its row is the last token's only if c + s reaches everything known of the request:
    otherwise the step is one part of a chunked prefill, or of a recomputation after
    preemption, and the row belongs to a token in the middle. A row is due when n is a
    multiple of k, so that the end of prefill (n = 0) is always captured.

    Args:
        k: tokens between two captured rows of a request.
        consumers: receive every captured row and every finished request.
    """

    def __init__(self, k: int, consumers: Sequence[RowConsumer]) -> None:
        self.k = k
        self.consumers = tuple(consumers)
        self.steps = 0
        self.thread_seconds = 0.0
        self._prompt_tokens: dict[str, int] = {}
        self._due: dict[str, int] = {}

    def request_added(self, request_id: str, prompt_tokens: int) -> None:
        """Learn of a request, before its first `request_scheduled`."""
        self._prompt_tokens[request_id] = prompt_tokens

    def request_scheduled(self, request_id: str, computed: int, scheduled: int, known: int) -> None:
        """Note a request of this step, and whether its row is due.

        Args:
            request_id: a request learnt of by `request_added`.
            computed: tokens whose KV was there before the step.
            scheduled: tokens of this step.
            known: generated tokens that existed when the step was scheduled.
        """
        n = computed + scheduled - self._prompt_tokens[request_id]
        if n >= known and n % self.k == 0:
            self._due[request_id] = n

    def step_done(
        self,
        batch_request_ids: Sequence[str],
        gather: Callable[[list[int]], torch.Tensor],
        finished: list[FinishedRequest],
    ) -> None:
        """Hand on what the step brought.

        Args:
            batch_request_ids: [n_reqs] ids in the order of the batch.
            gather: copies the hidden states [n_rows, d] of the given batch positions.
            finished: requests that ended before this step was scheduled.
        """
        self.steps += 1
        if finished:
            for consumer in self.consumers:
                consumer.on_finished(finished)
            for request in finished:
                self._prompt_tokens.pop(request.request_id, None)
        if self._due:
            positions = [i for i, name in enumerate(batch_request_ids) if name in self._due]
            request_ids = [batch_request_ids[i] for i in positions]
            rows = CapturedRows(
                step=self.steps,
                request_ids=request_ids,
                prompt_tokens=[self._prompt_tokens[name] for name in request_ids],
                generated_tokens=[self._due[name] for name in request_ids],
                hidden_states=gather(positions),
            )
            self._due.clear()
            for consumer in self.consumers:
                consumer.on_rows(rows)

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
