"""`headway papers train-length`: predict answers' lengths from prompts, beside the hidden state."""

from pathlib import Path

import torch

from data_collection.versions import machine, source_commit, versions
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import HiddenStateMLP
from rescheduler.papers.prompt_length.buckets import BucketOptions, Shape
from rescheduler.papers.prompt_length.classifiers import EncoderOptions, ForestOptions
from rescheduler.papers.prompt_length.prompt_table import PromptSplit, load_answered_prompts
from rescheduler.papers.prompt_length.study import (
    LengthResults,
    LengthStudy,
    StudyOptions,
    write_results,
)

_ENCODER = EncoderOptions()
_FOREST = ForestOptions()


def train_length(
    dataset: Path,
    prompts: str,
    buckets: dict[str, BucketOptions] | None = None,
    out: Path = Path("runs/prompt_length"),
    hidden_state: str | None = None,
    task_names: dict[str, str] | None = None,
    encoder: EncoderOptions = _ENCODER,
    forest: ForestOptions = _FOREST,
    shape: Shape = "linear",
    limit: int = 8192,
    split_seed: int | None = None,
    seed: int = 0,
) -> None:
    """Train and measure predictors of answer lengths that read the prompt (Jain et al. 2025).

    For each choice of buckets: a fine-tuned encoder without and with a hint of the task, a random
    forest on prompt length and application, and what they must beat, all measured on the same
    test requests, those that ``hidden_state`` was not trained on either. Writes one checkpoint a
    variant, ``results.json``, ``report.md`` and a figure below OUT. Run it again to go on after
    an interruption: variants that are there are only measured.

    Args:
        dataset: folder recorded by ``headway collect``.
        prompts: the prompts that it was collected from, joined by their ids.
        buckets: name -> edges, width and until, or seconds and tokens_per_second.
        out: where to write.
        hidden_state: folder or Hugging Face id of a survival model or a regressor, to measure
            at the end of the same requests' prefill.
        task_names: what hints call a task; others keep their name.
        encoder: which, and how it is fine-tuned.
        forest: how it is grown.
        shape: how ends are spread inside a bucket.
        limit: tokens that no request passes: the serving model's context.
        split_seed: of the split; that of ``hidden_state`` when not given, or 0.
        seed: of every training.

    Raises:
        ValueError: the dataset has no answer to these prompts, or nothing can be learnt of it;
            or OUT holds variants of other settings.
        CheckpointError: a checkpoint cannot be used.
        ModelMismatchError: ``hidden_state`` is of another model.
    """
    if not buckets:
        raise ValueError("no buckets: give --buckets, or a --config of configs/prompt_length")
    chosen = {scheme: given.buckets() for scheme, given in buckets.items()}
    predictor = None if hidden_state is None else load_predictor(hidden_state)
    if split_seed is None:
        split_seed = int(predictor.provenance.get("split_seed", 0)) if predictor else 0
    split = load_answered_prompts(dataset, prompts, split_seed, task_names or {})
    counts = {name: len(part) for name, part in split.parts.items()}
    described = {
        "dataset": dataset.resolve().name,
        "prompts": Path(prompts).name,
        "requests": counts,
        "split_seed": split_seed,
    }
    print(f"{dataset}: {', '.join(f'{n} {name}' for name, n in counts.items())} requests")
    notes = _notes(split, predictor)
    options = StudyOptions(encoder, forest, shape, limit, seed)
    torch.manual_seed(seed)  # the first classifier is drawn before its training seeds anything
    study = LengthStudy(split, chosen, described, options, out)
    tasks, predicted_tasks = study.tasks() or (None, None)
    scores = {scheme: study.lengths(scheme, predicted_tasks, predictor) for scheme in chosen}
    provenance = {
        "model": split.parts["test"].rows.session.model,
        **described,
        "encoder": encoder.model,
        "commit": source_commit(),
        "machine": machine(),
        "versions": versions(),
    }
    test = split.parts["test"]
    write_results(LengthResults(test, chosen, scores, tasks, notes, provenance), out)


def _notes(split: PromptSplit, predictor: HiddenStateMLP | None) -> list[str]:
    """Describe the requests that the figures are about."""
    notes = []
    if split.unmatched:
        notes.append(f"{split.unmatched} requests of the dataset are of no prompt in the file")
    if split.left_out:
        notes.append(
            f"{split.left_out} requests are left out: cut otherwise than by max_tokens, or without "
            "a row at the end of prefill"
        )
    if predictor is not None:
        predictor.refuse_other_model(split.parts["test"].rows.session)
        same = predictor.provenance.get("rows", {}).get("train") == split.training_rows
        trained = "the training part of this split" if same else "other requests than these"
        notes.append(f"the hidden state's predictor was trained on {trained}")
    return notes
