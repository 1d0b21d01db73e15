"""`headway evaluate recalibrate`: recalibrate a predictor on served requests, which it logs.

The log is JSON Lines, one per request, with the outcome of its forecasts.
"""

import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from data_collection.files import text_lines
from predictor.evaluation.survival_metrics import LEVELS, coverage
from predictor.forecasts.kaplan_meier import fit_recalibration
from predictor.models.checkpoint import export_checkpoint, load_predictor
from predictor.models.survival_mlp import SurvivalMLP
from rescheduler.monitoring.forecast_quality import ScoredRequest, score
from rescheduler.telemetry.subscriber import TelemetrySubscriber, first_snapshot

_FEWEST_REQUESTS = 30
_DATASET_CARD = "dataset_card.md"
_LISTENING_SECONDS = 0.5
_LINE_SECONDS = 30.0
_BEGINNING = b'{"request_id":'
_BLOCK = 1 << 16

Level = Annotated[float, msgspec.Meta(ge=0, le=1)]


class LoggedRequest(msgspec.Struct, frozen=True):
    """One line of the log.

    Attributes:
        checkpoint: fingerprint of the predictor that forecast it.
        generated: [n_forecasts] tokens n when each forecast was made.
        levels: [n_forecasts] u = P(R ≤ tokens that came), without the cap.
        medians: [n_forecasts] tokens expected, under the cap.
    """

    request_id: str
    instance: str
    model: str
    checkpoint: str
    finish_reason: str
    total_tokens: int
    generated: list[int]
    levels: list[Level]
    cut: bool
    medians: list[float]

    def __post_init__(self) -> None:
        if not len(self.generated) == len(self.levels) == len(self.medians) > 0:
            raise ValueError("as many of generated, levels and medians, at least one")


class FinishedLog:
    """Appends scored requests to a file, each as one whole line.

    Half a line, which a killed writer or a full disk leaves at the end, is cut off first.

    Args:
        path: of the log; it and its folder are created if missing.

    Raises:
        ValueError: the file exists and is not such a log.
    """

    def __init__(self, path: Path) -> None:
        _refuse_other_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        os.ftruncate(self._file.fileno(), _size_of_whole_lines(path))

    def append(self, scored: ScoredRequest) -> bool:
        """Write one line; return whether the request's model is known, else skip it.

        Raises:
            OSError: the disk is full; nothing of the line is left.
        """
        finished = scored.finished
        if not finished.model:
            return False
        logged = LoggedRequest(
            request_id=finished.event.request_id,
            instance=finished.instance.name,
            model=finished.model,
            checkpoint=finished.checkpoint,
            finish_reason=finished.event.finish_reason,
            total_tokens=finished.event.total_tokens,
            generated=[int(n) for n in scored.generated],
            levels=scored.levels.clip(0, 1).round(6).tolist(),
            cut=scored.cut,
            medians=scored.medians.round(1).tolist(),
        )
        line = msgspec.json.encode(logged) + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            os.ftruncate(self._file.fileno(), before)
            raise OSError(errno.ENOSPC, "no room for another line", self._file.name)
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_finished_log(path: Path) -> Iterator[LoggedRequest]:
    """Yield the requests of a log, oldest first; half a line at its end is ignored.

    Raises:
        ValueError: the file is not there, or a whole line is none of a log.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give --telemetry, and {path} is written first")
    for number, line in enumerate(text_lines(path, half_line=False), start=1):
        if line.strip():
            yield _parsed(path, number, line)


def _parsed(path: Path, number: int, line: str | bytes) -> LoggedRequest:
    try:
        return msgspec.json.decode(line, type=LoggedRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, line {number}: no log of finished requests: {error}") from error


def _refuse_other_file(path: Path) -> None:
    """Refuse to append to a file that does not begin like a log."""
    if not path.exists():
        return
    with path.open("rb") as file:
        first = file.readline()
    if first.endswith(b"\n"):
        _parsed(path, 1, first)
    elif not _BEGINNING.startswith(first[: len(_BEGINNING)]):
        raise ValueError(f"{path}: no log of finished requests; give another file")


def _size_of_whole_lines(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def recalibrate(
    checkpoint: str,
    finished: Path,
    out: Path,
    last: int = 500,
    telemetry: str | list[str] | None = None,
    keys: Path | None = None,
) -> None:
    """Recalibrate a predictor on the requests that it forecast.

    The network stays as it is; what it calls an 80% interval holds 80% of the ends again. The
    log must be of engines that served this very checkpoint; restart them with the new one.

    Args:
        checkpoint: folder or Hugging Face id of the survival model that served.
        finished: Log of finished requests.
        out: new folder for the recalibrated checkpoint.
        last: number of requests to use, the newest that ran to completion.
        telemetry: first listen to an engine until so many more requests have ended, and append
            them to the log: its endpoint, such as tcp://127.0.0.1:5557, or a list of several.
        keys: folder of keys created by `headway keys`, which telemetry needs off the loopback.
    """
    if out.exists():
        raise ValueError(f"{out}: already exists; choose a new folder")
    if last < _FEWEST_REQUESTS:
        raise ValueError(f"last must be at least {_FEWEST_REQUESTS}, not {last}")
    predictor = load_predictor(checkpoint)
    if not isinstance(predictor, SurvivalMLP):
        raise ValueError(
            f"{checkpoint}: predicts one number, which has no probabilities to recalibrate; give "
            "a checkpoint trained with configs/predictor/survival.yaml"
        )
    if telemetry is not None:
        _listen([telemetry] if isinstance(telemetry, str) else telemetry, keys, finished, last)
    requests = _newest(finished, last)
    _refuse_other_predictors(requests, finished, predictor)
    if len(requests) < _FEWEST_REQUESTS:
        raise ValueError(
            f"{finished}: {len(requests)} requests ran to their end, at least "
            f"{_FEWEST_REQUESTS} are needed; give --telemetry to add more"
        )
    levels = np.concatenate([request.levels for request in requests])
    cut = np.concatenate([np.full(len(r.levels), r.cut) for r in requests])
    fitted = fit_recalibration(levels, cut)
    after = np.interp(levels, fitted.nominal, fitted.observed)
    predictor.recalibrate(fitted.after(predictor.recalibration))

    entry: dict[str, str | int | float] = {
        "on": datetime.now(UTC).date().isoformat(),
        "requests": len(requests),
        "forecasts": len(levels),
    }
    print(
        f"coverage on the {len(requests)} requests it was fitted to ({len(levels)} forecasts), "
        "so that the second column flatters:\n\n  interval  before  after"
    )
    for level in LEVELS:
        old, new = (coverage(u, cut, level / 100) for u in (levels, after))
        print(f"  {level:>7}%  {old:>6.1%}  {new:>5.1%}")
        entry |= {f"{level}% held": old, f"{level}% holds": new}
    export_checkpoint(predictor, out, predictor.provenance | {"recalibrated": entry})
    dataset_card = Path(checkpoint) / _DATASET_CARD
    if dataset_card.is_file():
        shutil.copyfile(dataset_card, out / _DATASET_CARD)
    print(f"\nwrote {out}")


def _listen(endpoints: list[str], keys: Path | None, finished: Path, number: int) -> None:
    """Append the next requests that end to a log."""
    for endpoint in endpoints:
        first_snapshot(endpoint, keys)
    with (
        closing(FinishedLog(finished)) as log,
        TelemetrySubscriber(endpoints, keys=keys) as subscriber,
    ):
        print(f"listening to {', '.join(endpoints)}; Ctrl-C keeps what {finished} has by then")
        logged, next_line = 0, time.monotonic()
        while logged < number:
            for scored in map(score, subscriber.take_finished()):
                if scored is not None:
                    logged += log.append(scored)
            if time.monotonic() >= next_line:
                print(f"{logged} of {number} requests have ended", flush=True)
                next_line += _LINE_SECONDS
            time.sleep(_LISTENING_SECONDS)


def _newest(finished: Path, last: int) -> list[LoggedRequest]:
    ended = (r for r in read_finished_log(finished) if r.finish_reason in ("stop", "length"))
    return list(deque(ended, maxlen=last))


def _refuse_other_predictors(
    requests: list[LoggedRequest], finished: Path, predictor: SurvivalMLP
) -> None:
    fingerprint = predictor.fingerprint()
    for request in requests:
        if request.model != predictor.serving_model:
            raise ValueError(
                f"{finished}: request {request.request_id} ran on {request.model}, this "
                f"checkpoint reads {predictor.serving_model}; give a log of that model only, or a "
                "smaller --last"
            )
        if request.checkpoint != fingerprint:
            raise ValueError(
                f"{finished}: request {request.request_id} was forecast by the predictor "
                f"{request.checkpoint}, this checkpoint is {fingerprint}; give the one that "
                "served, or a smaller --last"
            )
