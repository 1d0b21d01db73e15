"""Record captured rows as a labelled dataset, from a thread that never blocks the engine."""

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.capture_hook import Cadence, CapturedRows
from data_collection.capture.requests import FinishedRequest, as_recorded, parse_request_id
from data_collection.dataset.dataset_schema import (
    REQUESTS_SCHEMA,
    SERVER_STOPPED,
    Session,
    read_sessions,
    rows_schema,
    vector_type,
    write_card,
)
from data_collection.files import create_private_folder, replace_file

logger = logging.getLogger("headway.recorder")


@dataclass(slots=True)
class _OpenRequest:
    """Rows of a request that has not ended, in the order they came."""

    prompt_tokens: int
    max_tokens: int
    steps: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    vectors: list[npt.NDArray[Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    """Rows whose copy to the host may still be under way."""

    rows: CapturedRows
    on_host: torch.Tensor
    copied: torch.cuda.Event | None


class Recorder:
    """A `RowConsumer` that labels rows when their request ends and writes Parquet shards.

    The engine's thread only starts the copy to the host and puts it into a bounded queue;
    what does not fit is dropped and counted. The sink thread keeps the rows of running
    requests, labels them with the true length when the scheduler reports the end, and
    writes a shard when one is full or ``flush_seconds`` have passed. Shards are renamed
    into place, so that the folder is a valid dataset at every moment; a killed process
    loses the rows of its running requests and those of the last ``flush_seconds``.

    When writing fails (a full disk), finished rows stay in the queue's bound, writing is
    tried again every second, and `status` says why.

    Args:
        config: where and how to record.
        session: what is recorded; its counts are kept up to date here.

    Raises:
        DatasetError: the folder holds a dataset of another model, layer, dtype or k.
    """

    cadence: Cadence = "request"

    def __init__(self, config: RecordConfig, session: Session) -> None:
        self._config = config
        self._session = session
        self._dataset = Path(config.path)
        if any((self._dataset / "sessions").glob("*.json")):
            for earlier in read_sessions(self._dataset):
                session.refuse_mixing(earlier)
        create_private_folder(self._dataset)
        (self._dataset / "data").mkdir(exist_ok=True)
        session.write(self._dataset)
        write_card(self._dataset)
        self._schema = rows_schema(session.hidden_size, session.dtype)
        self._queue: SimpleQueue[_OnTheWay | list[FinishedRequest] | None] = SimpleQueue()
        self._queued_rows = 0  # written by the engine's thread only
        self._taken_rows = 0  # written by the sink thread only
        self._dropped_queueing = 0  # written by the engine's thread only
        self._dropped_writing = 0  # written by the sink thread only
        self._open: dict[str, _OpenRequest] = {}
        self._ready: list[tuple[dict[str, Any], pa.RecordBatch]] = []
        self._n_ready = 0
        self._first_ready = 0.0
        self._shards = 0
        self._error: str | None = None
        self._sink_seconds = 0.0
        self._copy_stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._sink, name="headway-recorder", daemon=True)
        self._thread.start()

    # The engine's thread.

    def on_rows(self, rows: CapturedRows) -> None:
        """Start the copy to the host and queue it; drop and count what does not fit."""
        n_rows = len(rows.request_ids)
        if self._queued_rows - self._taken_rows + n_rows > self._config.queue_rows:
            self._dropped_queueing += n_rows
            return
        self._queued_rows += n_rows
        self._queue.put(self._start_copy(rows))

    def on_finished(self, finished: list[FinishedRequest]) -> None:
        """Queue the ends of requests; they are small and never dropped."""
        self._queue.put(finished)

    def close(self) -> None:
        """Write everything, requests still running as censored, and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._error is not None:
            logger.error("recording into %s ended with an error: %s", self._dataset, self._error)

    def status(self) -> dict[str, Any]:
        """Return counts and the last error, for progress displays and tests."""
        return {
            "rows": self._session.rows + self._n_ready,
            "requests": self._session.requests + len(self._ready),
            "open_requests": len(self._open),
            "unwritten_rows": self._n_ready,
            "dropped_rows": self._dropped_queueing + self._dropped_writing,
            "refused_rows": self._session.refused_rows,
            "sink_seconds": self._sink_seconds,
            "error": self._error,
        }

    def _start_copy(self, rows: CapturedRows) -> _OnTheWay:
        on_device = rows.hidden_states
        if on_device.device.type != "cuda":
            return _OnTheWay(rows, on_device, None)
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(on_device.device)  # type: ignore[no-untyped-call]
        self._copy_stream.wait_stream(torch.cuda.current_stream(on_device.device))
        with torch.cuda.stream(self._copy_stream):
            on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            on_host.copy_(on_device, non_blocking=True)
            on_device.record_stream(self._copy_stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copy_stream)
        return _OnTheWay(rows, on_host, copied)

    # The sink thread.

    def _sink(self) -> None:
        try:
            self._record()
        except Exception as error:  # the engine must keep running; `status` reports it
            logger.exception("recording into %s stopped", self._dataset)
            self._error = f"{type(error).__name__}: {error} ({self._dataset})"

    def _record(self) -> None:
        stopping = False
        while not stopping:
            try:
                item = self._queue.get(timeout=1.0)
            except Empty:
                item = []
            if item is None:
                stopping = True
                self._censor_open_requests()
            elif isinstance(item, _OnTheWay):
                self._take_rows(item)
            else:
                for request in item:
                    self._label(request)
            if self._ready and (stopping or self._is_due()):
                self._flush()
            self._sink_seconds = time.thread_time()
        self._dropped_writing += self._n_ready  # the last attempt to write failed
        self._session.closed = datetime.now(UTC).isoformat(timespec="seconds")
        self._describe()

    def _is_due(self) -> bool:
        waited = time.monotonic() - self._first_ready
        pause = 1.0 if self._error else self._config.flush_seconds
        full = self._n_ready >= self._config.shard_rows and not self._error
        return full or waited >= pause

    def _take_rows(self, item: _OnTheWay) -> None:
        if item.copied is not None:
            item.copied.synchronize()
        rows, vectors = item.rows, item.on_host.float().numpy()
        with np.errstate(over="ignore"):  # counted below
            stored = vectors.astype(self._session.dtype, copy=True)
        fits = np.isfinite(stored).all(axis=1)
        for i, request_id in enumerate(rows.request_ids):
            if not fits[i]:
                self._refuse(request_id, vectors[i])
                continue
            request = self._open.get(request_id)
            if request is None:
                request = self._open[request_id] = _OpenRequest(
                    rows.prompt_tokens[i], rows.max_tokens[i]
                )
            request.steps.append(rows.step)
            request.generated.append(rows.generated_tokens[i])
            request.vectors.append(stored[i].copy())
        self._taken_rows += len(rows.request_ids)

    def _refuse(self, request_id: str, vector: npt.NDArray[np.float32]) -> None:
        if self._session.refused_rows == 0:
            logger.error(
                "request %s: a hidden state's largest magnitude is %s, outside %s; the row is "
                "left out. Record with dtype: float32",
                request_id,
                np.abs(vector).max(),
                self._session.dtype,
            )
        self._session.refused_rows += 1

    def _label(self, finished: FinishedRequest) -> None:
        """Turn a finished request's rows into a record batch.

        Asynchronous scheduling runs a request one step past its end, so rows with
        n >= total are dropped; a row captured again after preemption replaces the first.
        """
        request = self._open.pop(finished.request_id, None) or _OpenRequest(
            finished.prompt_tokens, finished.max_tokens
        )
        if self._config.replays:
            recorded = as_recorded(finished)
            if recorded is None:
                return
            finished = recorded
        latest = {n: i for i, n in enumerate(request.generated) if n < finished.total_tokens}
        order = [latest[n] for n in sorted(latest)]
        generated = np.array([request.generated[i] for i in order], dtype=np.int32)
        vectors = np.array([request.vectors[i] for i in order], dtype=self._session.dtype)
        shared = {
            "request_id": finished.request_id,
            "prompt_tokens": finished.prompt_tokens,
            "censored": finished.finish_reason != "stop",
            "finish_reason": finished.finish_reason,
            "max_tokens": finished.max_tokens,
            "source": str(finished.extra_args.get("headway_source", "live")),
            "task": str(finished.extra_args.get("headway_task", "")),
        }
        columns = {name: [value] * len(order) for name, value in shared.items()} | {
            "step_index": [request.steps[i] for i in order],
            "generated_tokens": generated,
            "remaining_tokens": finished.total_tokens - generated,
            "hidden_state": pa.FixedSizeListArray.from_arrays(
                pa.array(vectors.reshape(-1)),
                type=vector_type(self._session.hidden_size, self._session.dtype),
            ),
        }
        entry = {
            **shared,
            **parse_request_id(finished.request_id)._asdict(),
            "total_tokens": finished.total_tokens,
            "temperature": finished.temperature,
            "top_p": finished.top_p,
            "adapter": finished.adapter,
            "rows": len(order),
            "prompt_token_ids": finished.prompt_token_ids if self._config.tokens else None,
            "output_token_ids": finished.output_token_ids if self._config.tokens else None,
        }
        if not self._ready:
            self._first_ready = time.monotonic()
        self._ready.append((entry, pa.RecordBatch.from_pydict(columns, self._schema)))
        self._n_ready += len(order)

    def _censor_open_requests(self) -> None:
        """Label requests that still run: all we know is that n tokens were not the end.

        A replay that was cut short is done again, whole, by whoever resumes.
        """
        if self._config.replays:
            self._open.clear()
        for request_id, request in list(self._open.items()):
            self._label(
                FinishedRequest(
                    request_id=request_id,
                    finish_reason=SERVER_STOPPED,
                    prompt_tokens=request.prompt_tokens,
                    total_tokens=max(request.generated) + 1,
                    max_tokens=request.max_tokens,
                    prompt_token_ids=None,
                    output_token_ids=[],
                    extra_args={},
                )
            )

    def _flush(self) -> None:
        shard = f"{self._session.name}-{self._shards:05d}.parquet"
        rows = pa.Table.from_batches([batch for _, batch in self._ready], schema=self._schema)
        requests = pa.Table.from_pylist([entry for entry, _ in self._ready], REQUESTS_SCHEMA)
        data = self._dataset / "data"
        try:
            # Both are whole before either is renamed, and rows never appear without requests.
            with (
                replace_file(data / f"rows-{shard}") as new_rows,
                replace_file(data / f"requests-{shard}") as new_requests,
            ):
                # Hidden states hardly compress; the columns beside them do.
                pq.write_table(rows, new_rows, compression="zstd", use_dictionary=["request_id"])
                pq.write_table(requests, new_requests, compression="zstd")
        except OSError as error:
            self._first_ready = time.monotonic()
            if self._error is None:
                logger.error("cannot write %s: %s; trying again", data / f"rows-{shard}", error)
            self._error = f"{_reason(error)} ({self._dataset})"
            self._drop_what_exceeds_the_bound()
            return
        self._error = None
        self._shards += 1
        self._session.rows += rows.num_rows
        self._session.requests += requests.num_rows
        self._ready.clear()
        self._n_ready = 0
        self._describe()

    def _drop_what_exceeds_the_bound(self) -> None:
        while self._n_ready > self._config.queue_rows:
            _, batch = self._ready.pop(0)
            self._n_ready -= batch.num_rows
            self._dropped_writing += batch.num_rows

    def _describe(self) -> None:
        self._session.dropped_rows = self._dropped_queueing + self._dropped_writing
        try:
            self._session.write(self._dataset)
            write_card(self._dataset)
        except OSError as error:
            self._error = f"{_reason(error)} ({self._dataset})"


def _reason(error: OSError) -> str:
    """Name a failed write: Arrow hides "No space left on device" in a longer text."""
    return os.strerror(error.errno) if error.errno else str(error)
