"""`headway collect`: start the engine, drive prompts, record a dataset; resumable."""

import shutil
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.filesize import decimal

from data_collection.capture.capture_config import CaptureConfig, read_capture_config
from data_collection.capture.requests import RequestName, parse_request_id
from data_collection.dataset.dataset_schema import (
    SERVER_STOPPED,
    DatasetError,
    read_columns,
    read_sessions,
    requests_files,
    write_card,
)
from data_collection.models import ModelIdentity, identify, resolve_model
from data_collection.versions import vllm_version
from data_collection.workload.arrivals import Arrivals
from data_collection.workload.engine_options import (
    ID_PREFIX,
    EngineOptions,
    RecordOptions,
    Sampling,
    engine_arguments,
    engine_output_to,
    last_lines,
)
from data_collection.workload.engine_requests import (
    RequestSource,
    prompt_requests,
    transcript_requests,
)
from data_collection.workload.prompts import PromptError, load_prompts, load_transcripts

_LOG = "engine.log"
_ENDED = ("stop", "length", "repetition")


def collect(
    out: Path,
    model: str = "smollm2",
    prompts: str = "starter",
    transcripts: Path | None = None,
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
        out: The dataset's folder. If it exists, the recording continues there.
        model: ``smollm2`` (embedded), a Hugging Face id, or a folder.
        prompts: ``starter``, a JSONL file with ``prompt`` or ``messages``, or the id of a
            Hugging Face dataset.
        transcripts: Prompts with answers, instead of prompts. They are computed as prefills, and
            give the rows that generating them gives. Use what `headway dataset transcripts` wrote,
            or JSON Lines with ``prompt``, ``messages`` or ``prompt_token_ids``, and ``answer`` or
            ``output_token_ids``.
        limit: Use only so many prompts, from the first. If not set, all.
        sampling: how tokens are sampled; a prompt's own settings come first.
        arrivals: when requests arrive.
        record: what is recorded.
        engine: the engine that is started.
        verbose: show the engine's messages, instead of writing them to ``OUT/engine.log``.

    Raises:
        CollectionError: the collection ended early; the message says what was lost.
        DatasetError: ``out`` holds a dataset of another model.
        PromptError: the prompts or transcripts cannot be used.
    """
    work = (
        _prompts(out, prompts, limit, sampling)
        if transcripts is None
        else _transcripts(out, transcripts, limit, model)
    )
    replays = transcripts is not None
    recording = {"path": str(out.resolve()), "dtype": record.dtype, "replays": replays}
    recording |= {"flush_seconds": record.flush_seconds}
    kind = {"k": record.k, "layer": record.layer, "state_half_life": record.state_half_life}
    capture = {"headway": {**kind, "record": recording}}
    read_capture_config(capture, CaptureConfig)
    if work.n_done:
        print(f"{work.n_done} of {work.n_done + work.n_left} {work.what} are done already")
    if not work.n_left:
        return
    options = {
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": arrivals.concurrency,
        **({} if engine.enforce_eager is None else {"enforce_eager": engine.enforce_eager}),
        **engine.extra,
    }
    if replays:
        options["enable_prefix_caching"] = False  # the states of cached tokens are not computed
    if vllm_version() is None:
        raise RuntimeError("vLLM is not installed; run `headway doctor`")
    folder = resolve_model(model)
    _refuse_missing_layer(folder, record.layer)
    _refuse_other_dataset(out, identify(folder), record)
    arguments = engine_arguments(folder, capture, options)
    earlier = _recorded_answers(out)
    width = None if replays else hidden_size(folder)
    if width is not None:
        answers = work.n_left * sampling.n
        room = room_on_disk(_existing(out), width, answers, sampling.max_tokens, record)
        print(room, file=sys.stderr)
    log = None if verbose else out / _LOG
    print(
        f"starting the engine for {work.n_left} {work.what}"
        + (f", its log in {log}" if log else ""),
        file=sys.stderr,
        flush=True,
    )
    try:
        with engine_output_to(log) as terminal:
            # It loads vLLM, which takes long.
            from data_collection.workload.drive import CollectionError, drive

            ended = drive(work.source, arguments, arrivals, terminal)
    finally:
        _describe(out, sampling, arrivals, prompts, transcripts)
    lost = ended - (_recorded_answers(out) - earlier)
    if lost > 0:
        raise CollectionError(
            f"recording failed at the end: {lost} of {ended} answers could not be written. The "
            "shards written so far are a valid dataset. Fix the cause and run the same command "
            f"again to resume{last_lines(log)}"
        )


def hidden_size(model: str) -> int | None:
    """Return the width d of a resolved model's captured states, by its configuration."""
    config = _text_config(model)
    # OPT projects its states before the output matrix.
    width = getattr(config, "word_embed_proj_dim", None) or getattr(config, "hidden_size", None)
    return width if isinstance(width, int) else None


def _text_config(model: str) -> Any:
    """Return the configuration of a resolved model, or None: the engine says what is wrong."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    except (OSError, ValueError):
        return None


def hidden_layers(model: str) -> int | None:
    """Return how many layers a resolved model has, by its configuration."""
    layers = getattr(_text_config(model), "num_hidden_layers", None)
    return layers if isinstance(layers, int) else None


def _refuse_missing_layer(model: str, layer: int) -> None:
    """Refuse, before an engine is started, what its worker would refuse."""
    layers = hidden_layers(model) if layer else None
    if layers is not None and layer > layers:
        raise ValueError(f"--record.layer {layer}: the model has {layers} layers")


def room_on_disk(out: Path, d: int, answers: int, max_tokens: int, record: RecordOptions) -> str:
    r"""Return in words how much the hidden states can take, and how much is free.

    .. math:: \text{answers} \cdot \lceil \text{max\_tokens} / k \rceil \cdot d \cdot
        \text{bytes of a number}

    Answers that end by themselves take less, prompts with a ``max_tokens`` of their own perhaps
    more; tokens and counts are a few percent of it.
    """
    rows = answers * -(-max_tokens // record.k)
    most, free = rows * d * np.dtype(record.dtype).itemsize, shutil.disk_usage(out).free
    said = (
        f"up to about {decimal(most)} of hidden states ({answers:,} answers of up to "
        f"{max_tokens:,} tokens, {d:,} numbers of {record.dtype} every {record.k}); "
        f"{decimal(free)} are free"
    )
    if most < free:
        return said
    return f"warning: {said}. A larger --record.k or a smaller --limit needs less"


def _existing(folder: Path) -> Path:
    """Return the folder, or the one that it will be made in."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


class _Work(NamedTuple):
    """What is left to do."""

    source: RequestSource
    what: str
    n_left: int
    n_done: int


def _prompts(out: Path, prompts: str, limit: int | None, sampling: Sampling) -> _Work:
    everything = load_prompts(prompts, limit)
    done = _done_prompts(out, sampling.n)
    left = [prompt for prompt in everything if prompt.id not in done]
    n_done = len(everything) - len(left)
    return _Work(prompt_requests(left, sampling), "prompts", len(left), n_done)


def _transcripts(out: Path, path: Path, limit: int | None, model: str) -> _Work:
    file = load_transcripts(path, limit)
    if file.model is not None:
        identity = identify(resolve_model(model))
        if (file.model, file.revision) != (identity.name, identity.revision):
            raise PromptError(
                f"{path}: transcripts of {file.model}, revision {file.revision}; the model is "
                f"{identity.name}, revision {identity.revision}, whose states would be of "
                "answers that it did not give"
            )
    done = _done_answers(out)
    left = [one for one in file.transcripts if parse_request_id(one.request_id) not in done]
    n_done = len(file.transcripts) - len(left)
    return _Work(transcript_requests(left), "transcripts", len(left), n_done)


def _done_answers(dataset: Path) -> set[RequestName]:
    """Return the names of all answers in the dataset; of replays only whole ones are kept."""
    names = read_columns(requests_files(dataset), list(RequestName._fields)).to_pylist()
    return {RequestName(**name) for name in names}


def _recorded_answers(dataset: Path) -> int:
    """Return how many answers that ended are in the dataset."""
    ends = read_columns(requests_files(dataset), ["finish_reason"]).to_pylist()
    return sum(end["finish_reason"] != SERVER_STOPPED for end in ends)


def _refuse_other_dataset(dataset: Path, model: ModelIdentity, record: RecordOptions) -> None:
    """Refuse, before an engine is started, what the recorder would refuse."""
    if not (dataset / "sessions").is_dir():
        return
    for earlier in read_sessions(dataset):
        wanted = replace(
            earlier,
            model=model.name,
            revision=model.revision,
            k=record.k,
            dtype=record.dtype,
            layer=str(record.layer or "last"),
            state_half_life=record.state_half_life,
        )
        wanted.refuse_mixing(earlier)


def _done_prompts(dataset: Path, n: int) -> set[str]:
    """Return the ids of prompts whose n answers are all in the dataset.

    Answers cut by a stop of the server or by a leaving client do not count.
    """
    answers = read_columns(requests_files(dataset), ["external_id", "finish_reason"]).to_pylist()
    counts = Counter(one["external_id"] for one in answers if one["finish_reason"] in _ENDED)
    return {name.removeprefix(ID_PREFIX) for name, count in counts.items() if count >= n}


def _describe(
    dataset: Path, sampling: Sampling, arrivals: Arrivals, prompts: str, transcripts: Path | None
) -> None:
    """Write into the newest session how it was driven, and print what it has recorded."""
    try:
        session = read_sessions(dataset)[-1]
    except DatasetError:
        return  # the engine never started
    if transcripts is None:
        session.sampling = asdict(sampling)
        session.workload = {"prompts": Path(prompts).name, **asdict(arrivals)}
    else:
        session.workload = {"transcripts": transcripts.name, **asdict(arrivals)}
    if arrivals.trace:
        session.workload["trace"] = Path(arrivals.trace).name
    session.write(dataset)
    write_card(dataset)
    lost = {"dropped": session.dropped_rows, "refused": session.refused_rows}
    counts = [f"{count} {how}" for how, count in lost.items() if count]
    print(", ".join([f"{session.rows} rows of {session.requests} requests recorded", *counts]))
