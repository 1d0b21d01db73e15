"""`headway collect`: start the engine, drive prompts, record a dataset; resumable."""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_collection.capture.capture_config import CaptureConfig, read_capture_config
from data_collection.dataset.dataset_card import write_card
from data_collection.dataset.dataset_schema import DatasetError, read_sessions, requests_files
from data_collection.models import ModelIdentity, identify, resolve_model
from data_collection.versions import vllm_version
from data_collection.workload.arrivals import Arrivals
from data_collection.workload.engine_log import engine_output_to
from data_collection.workload.engine_options import (
    ID_PREFIX,
    EngineOptions,
    RecordOptions,
    Sampling,
    engine_arguments,
)
from data_collection.workload.prompts import load_prompts

__all__ = ["collect", "done_prompts"]

_LOG = "engine.log"
_ENDED = pa.array(["stop", "length", "repetition"])


def collect(
    out: Path,
    model: str = "smollm2",
    prompts: str = "starter",
    limit: int | None = None,
    sampling: Sampling = Sampling(),
    arrivals: Arrivals = Arrivals(),
    record: RecordOptions = RecordOptions(),
    engine: EngineOptions = EngineOptions(),
    verbose: bool = False,
) -> None:
    """Collect a dataset of hidden states and remaining lengths from a model in vLLM.

    Starts the engine, drives the prompts and records every k-th step of every request. Run
    it again to resume: prompts that are done are not repeated. Ctrl-C, a killed engine and
    a full disk leave a valid dataset.

    Args:
        out: folder of the dataset; continued when it exists.
        model: ``smollm2`` (embedded), a Hugging Face id, or a folder.
        prompts: ``starter``, a JSONL file with ``prompt`` or ``messages``, or the id of a
            Hugging Face dataset.
        limit: number of prompts to drive, from the first; all when not given.
        sampling: how tokens are sampled.
        arrivals: when requests arrive.
        record: what is recorded.
        engine: the engine that is started.
        verbose: show the engine's messages, in place of writing them to ``OUT/engine.log``.

    Raises:
        CollectionError: the collection ended early; the message says what was lost.
        DatasetError: ``out`` holds a dataset of another model.
        PromptError: the prompts cannot be used.
    """
    everything = load_prompts(prompts, limit)
    recording = {"path": str(out.resolve()), "dtype": record.dtype}
    capture = {
        "headway": {
            "k": record.k,
            "record": {**recording, "flush_seconds": record.flush_seconds},
        }
    }
    read_capture_config(capture, CaptureConfig)
    done = done_prompts(out, sampling.n)
    to_do = [prompt for prompt in everything if prompt.id not in done]
    if len(to_do) < len(everything):
        print(f"{len(everything) - len(to_do)} of {len(everything)} prompts are done already")
    if not to_do:
        return
    options = {
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": arrivals.concurrency,
        "enforce_eager": engine.enforce_eager,
        **engine.extra,
    }
    if vllm_version() is None:
        raise RuntimeError("vLLM is not installed; run `headway doctor`")
    folder = resolve_model(model)
    _refuse_other_dataset(out, identify(folder), record)
    arguments = engine_arguments(folder, capture, options)
    log = None if verbose else out / _LOG
    print(
        f"starting the engine for {len(to_do)} prompts" + (f", its log in {log}" if log else ""),
        file=sys.stderr,
        flush=True,
    )
    try:
        with engine_output_to(log) as terminal:
            from data_collection.workload.drive import drive  # loads vLLM, which takes long

            drive(to_do, arguments, sampling, arrivals, terminal)
    finally:
        _describe(out, sampling, arrivals, prompts)


def _refuse_other_dataset(dataset: Path, model: ModelIdentity, record: RecordOptions) -> None:
    """Refuse, before an engine is started, what the recorder would refuse."""
    if not (dataset / "sessions").is_dir():
        return
    for earlier in read_sessions(dataset):
        wanted = replace(
            earlier, model=model.name, revision=model.revision, k=record.k, dtype=record.dtype
        )
        wanted.refuse_mixing(earlier)


def done_prompts(dataset: Path, n: int) -> set[str]:
    """Return the ids of prompts whose n answers are all in the dataset.

    Answers cut by a stop of the server or by a leaving client do not count.
    """
    counts: dict[str, int] = {}
    for file in requests_files(dataset):
        table = pq.read_table(file, columns=["external_id", "finish_reason"])
        ended = pc.is_in(table["finish_reason"], value_set=_ENDED)
        for name in table.filter(ended)["external_id"].to_pylist():
            counts[name] = counts.get(name, 0) + 1
    return {name.removeprefix(ID_PREFIX) for name, count in counts.items() if count >= n}


def _describe(dataset: Path, sampling: Sampling, arrivals: Arrivals, prompts: str) -> None:
    """Write into the newest session how it was driven."""
    try:
        session = read_sessions(dataset)[-1]
    except DatasetError:
        return  # the engine never started
    session.sampling = asdict(sampling)
    session.workload = {"prompts": Path(prompts).name, **asdict(arrivals)}
    if arrivals.trace:
        session.workload["trace"] = Path(arrivals.trace).name
    session.write(dataset)
    write_card(dataset)
