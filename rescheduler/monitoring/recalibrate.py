"""`headway evaluate recalibrate`: recalibrate a predictor on served requests."""

import shutil
import time
from collections import deque
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from predictor.evaluation.survival_metrics import LEVELS, coverage
from predictor.forecasts.kaplan_meier import fit_recalibration
from predictor.models.checkpoint import export_checkpoint, load_predictor
from predictor.models.survival_mlp import SurvivalMLP
from rescheduler.monitoring.finished_log import FinishedLog, LoggedRequest, read_finished_log
from rescheduler.monitoring.forecast_quality import score
from rescheduler.telemetry.subscriber import TelemetrySubscriber, first_snapshot

_FEWEST_REQUESTS = 30
_DATASET_CARD = "dataset_card.md"
_LISTENING_SECONDS = 0.5
_LINE_SECONDS = 30.0


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
        finished: log of finished requests.
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
