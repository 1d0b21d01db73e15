"""`headway papers train-length`: predict answers' lengths from prompts, beside the hidden state."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from data_collection.versions import machine, source_commit, versions
from predictor.evaluation.comparators import KaplanMeier
from predictor.forecasts.forecast import Forecast
from predictor.models.checkpoint import load_predictor, read_config
from predictor.models.hidden_state_mlp import HiddenStateMLP
from predictor.training.rows_data_module import request_rows
from rescheduler.papers.fine_tuning import LabelledTexts
from rescheduler.papers.prompt_length.buckets import (
    BucketCurve,
    BucketOptions,
    LengthBuckets,
    LengthScores,
    Shape,
    accuracy_by_task,
    length_scores,
)
from rescheduler.papers.prompt_length.classifiers import (
    BucketFrequencies,
    EncoderClassifier,
    EncoderOptions,
    ForestOptions,
    LengthForest,
    train_classifier,
)
from rescheduler.papers.prompt_length.length_predictor import (
    LengthClassifier,
    LengthPredictor,
    load_length_predictor,
    load_task_classifier,
    save_length_predictor,
    save_task_classifier,
)
from rescheduler.papers.prompt_length.prompt_table import (
    AnsweredPrompts,
    Prompts,
    PromptSplit,
    load_answered_prompts,
)
from rescheduler.simulator.results.report import (
    create_panels,
    finish_axes,
    markdown_table,
    write_report,
)

_ENCODER = EncoderOptions()
_FOREST = ForestOptions()


METHODS = {
    "majority": "Most frequent bucket",
    "task_majority": "Most frequent bucket of the task",
    "forest": "Random forest: prompt length, application",
    "encoder": "Encoder",
    "encoder_hint": "Encoder, hint: true task",
    "encoder_predicted_hint": "Encoder, hint: predicted task",
    "kaplan_meier": "Kaplan–Meier, no bucket",
    "hidden_state": "Hidden state at the end of prefill",
}
"""What is measured, and what tables call it."""

Labels = Callable[[AnsweredPrompts], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class TaskScores:
    """How well the task can be classified from the prompt (Jain et al. 2025, C.8).

    Attributes:
        accuracy: share of the test prompts whose task was classified correctly.
        majority: that of the most frequent training task.
        by_task: accuracy on each.
    """

    accuracy: float
    majority: float
    by_task: dict[str, float]


@dataclass(frozen=True)
class LengthStudy:
    """Trains what an earlier run has not left below a folder, and measures it.

    Attributes:
        split: the requests.
        buckets: the choices of length buckets, by what they are called.
        described: dataset, prompts and split, as checkpoints record it.
        encoder: which, and how it is fine-tuned; so ``forest``.
        shape: how ends are spread inside a bucket.
        limit: tokens that no request passes.
        seed: of every training.
        out: folder of the checkpoints, one a variant.

    Raises:
        ValueError: all training requests are in one bucket; later, the folder holds a variant of
            other settings.
    """

    split: PromptSplit
    buckets: Mapping[str, LengthBuckets]
    described: Mapping[str, Any]
    encoder: EncoderOptions
    forest: ForestOptions
    shape: Shape
    limit: int
    seed: int
    out: Path

    def __post_init__(self) -> None:
        for scheme, ranges in self.buckets.items():
            found = ranges.of(self._train.total_tokens)
            if (found == found[0]).all():
                raise ValueError(
                    f"{scheme}: all {len(found)} training requests generated "
                    f"{ranges.names[found[0]]} tokens, in one bucket: there is nothing to learn"
                )

    @property
    def _train(self) -> AnsweredPrompts:
        return self.split.parts["train"]

    @property
    def _test(self) -> AnsweredPrompts:
        return self.split.parts["test"]

    @property
    def _model(self) -> str:
        return self._train.rows.session.model

    def tasks(self) -> tuple[TaskScores, Prompts] | None:
        """Return how well tasks are classified, and the test prompts with the predicted tasks.

        None where all requests are of one task: there is nothing to classify, and no hint to give.
        """
        if len(self.split.tasks) < 2:
            return None
        test = self._test.prompts
        predicted = self._task_classifier().predicted(test)
        right = np.array(predicted) == np.array(test.task)
        names, counts = np.unique(self._train.prompts.task, return_counts=True)
        scores = TaskScores(
            accuracy=float(right.mean()),
            majority=float((np.array(test.task) == names[counts.argmax()]).mean()),
            by_task=accuracy_by_task(right, self._test),
        )
        return scores, test.with_tasks(predicted)

    def lengths(
        self,
        scheme: str,
        predicted_tasks: Prompts | None,
        hidden_state: HiddenStateMLP | None,
    ) -> dict[str, LengthScores]:
        """Return the scores of every method for one choice of buckets, by `METHODS`.

        Args:
            scheme: what the choice is called.
            predicted_tasks: the test prompts with predicted tasks; None: hint at nothing.
            hidden_state: what to measure at the end of the same requests' prefill.
        """
        train, test, buckets = self._train, self._test.prompts, self.buckets[scheme]
        curve = BucketCurve.fit(buckets, train.total_tokens, train.cut, self.limit, self.shape)
        found = buckets.of(train.total_tokens)
        methods: dict[str, tuple[BucketFrequencies | LengthClassifier, Prompts]] = {
            "majority": (BucketFrequencies(train.prompts, found, buckets.names, False), test),
            "task_majority": (BucketFrequencies(train.prompts, found, buckets.names, True), test),
            "forest": (self._forest(f"{scheme}-forest", curve), test),
            "encoder": (self._encoder(scheme, curve, False), test),
        }
        if predicted_tasks is not None:
            hinted = self._encoder(f"{scheme}-hint", curve, True)
            methods["encoder_hint"] = hinted, test
            methods["encoder_predicted_hint"] = hinted, predicted_tasks
        scores = {}
        for name, (classifier, prompts) in methods.items():
            probabilities = classifier.probabilities(prompts)
            forecast = curve.forecast(probabilities, prompts.max_tokens)
            scores[name] = length_scores(buckets, probabilities, forecast, self._test)
        for name, curves in self._unbucketed(hidden_state).items():
            scores[name] = length_scores(buckets, buckets.masses(curves), curves, self._test)
        return scores

    def _unbucketed(self, hidden_state: HiddenStateMLP | None) -> dict[str, Forecast]:
        """Forecasts of the test requests by methods that know no buckets."""
        kaplan_meier = KaplanMeier()
        kaplan_meier.fit(self._train.rows, self._train.rows)
        curves: dict[str, Forecast] = {"kaplan_meier": kaplan_meier.forecast(self._test.rows)}
        if hidden_state is not None:
            curves["hidden_state"] = hidden_state.forecast(request_rows(self._test.rows))
        return curves

    def _task_classifier(self) -> EncoderClassifier:
        """Return a classifier of the task (C.8)."""
        folder, settings = self.out / "task", self._settings(asdict(self.encoder))
        if self._is_there(folder, settings):
            return load_task_classifier(folder)
        tasks = self.split.tasks
        place = {task: i for i, task in enumerate(tasks)}
        classifier, trained = self._fine_tuned(
            folder, tasks, False, lambda part: np.array([place[task] for task in part.prompts.task])
        )
        save_task_classifier(classifier, self._model, _provenance(settings, trained), folder)
        return classifier

    def _encoder(self, name: str, curve: BucketCurve, hinted: bool) -> LengthClassifier:
        """Return an encoder that predicts the curve's buckets (§4.1), with the hint or without."""
        buckets = curve.buckets
        return self._length_classifier(
            name,
            curve,
            {"hinted": hinted, **asdict(self.encoder)},
            lambda folder: self._fine_tuned(
                folder, buckets.names, hinted, lambda part: buckets.of(part.total_tokens)
            ),
        )

    def _forest(self, name: str, curve: BucketCurve) -> LengthClassifier:
        """Return a forest on prompt length and application (C.12)."""
        train, buckets = self._train, curve.buckets
        found = buckets.of(train.total_tokens)

        def grown(folder: Path) -> tuple[LengthClassifier, dict[str, Any]]:
            tasks = self.split.tasks
            return LengthForest.grow(
                train.prompts, found, buckets.names, tasks, self.forest, self.seed
            ), {}

        return self._length_classifier(name, curve, asdict(self.forest), grown)

    def _length_classifier(
        self,
        name: str,
        curve: BucketCurve,
        own: dict[str, Any],
        train: Callable[[Path], tuple[LengthClassifier, dict[str, Any]]],
    ) -> LengthClassifier:
        folder, settings = self.out / name, self._settings({"curve": asdict(curve), **own})
        if self._is_there(folder, settings):
            return load_length_predictor(folder).classifier
        classifier, trained = train(folder)
        provenance = _provenance(settings, trained)
        save_length_predictor(LengthPredictor(classifier, curve, self._model, provenance), folder)
        return classifier

    def _fine_tuned(
        self, folder: Path, labels: tuple[str, ...], hinted: bool, labelled: Labels
    ) -> tuple[EncoderClassifier, dict[str, Any]]:
        options = self.encoder
        classifier = EncoderClassifier.pretrained(
            options.model, labels, self.split.tasks, hinted, options.max_tokens, options.dropout
        )
        print(f"{folder.name}: fine-tuning on {len(self._train)} prompts", flush=True)
        train, validation = (
            LabelledTexts(classifier.token_ids(part.prompts), labelled(part))
            for part in (self._train, self.split.parts["validation"])
        )
        return classifier, train_classifier(
            classifier, train, validation, options, folder, self.seed
        )

    def _settings(self, own: dict[str, Any]) -> dict[str, Any]:
        """Everything that a variant is a consequence of, as JSON gives it back."""
        settings = {**self.described, "seed": self.seed, **own}
        known: dict[str, Any] = json.loads(json.dumps(settings))
        return known

    def _is_there(self, folder: Path, settings: dict[str, Any]) -> bool:
        if not (folder / "config.json").is_file():
            return False
        if read_config(folder).get("provenance", {}).get("settings") != settings:
            raise ValueError(
                f"{folder} was trained with other settings: give another --out, or move it away"
            )
        print(f"{folder.name}: trained already", flush=True)
        return True


def _provenance(settings: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        **trained,
        "commit": source_commit(),
        "versions": versions(),
        "machine": machine(),
    }


_FEW = 10
"""Test requests below which a task has no row of its own: its accuracies would say nothing."""


@dataclass(frozen=True)
class LengthResults:
    """Everything that was measured: scores by the choice of buckets, then by method."""

    test: AnsweredPrompts
    buckets: dict[str, LengthBuckets]
    scores: dict[str, dict[str, LengthScores]]
    tasks: TaskScores | None
    notes: list[str]
    provenance: dict[str, Any]


def write_results(results: LengthResults, out: Path) -> None:
    """Write ``results.json``, ``report.md`` and ``results.png``, and print the report."""
    document = {
        "buckets": {name: list(buckets.edges) for name, buckets in results.buckets.items()},
        "scores": {
            scheme: {name: asdict(scores) for name, scores in methods.items()}
            for scheme, methods in results.scores.items()
        },
        "tasks": asdict(results.tasks) if results.tasks else None,
        "test": _task_rows(results.test),
        "notes": results.notes,
        "provenance": results.provenance,
    }
    texts = {"results.json": json.dumps(document, indent=1) + "\n", "report.md": _report(results)}
    figures = {"results.png": _figure(results)}
    write_report(out, texts, figures)
    print(texts["report.md"])
    for name in (*texts, *figures):
        print(out / name)


def _task_rows(test: AnsweredPrompts) -> list[dict[str, Any]]:
    """Return, of the test requests of each task and of all, means and the share that was cut."""
    task = np.array(test.prompts.task)
    here = {str(name): task == name for name in np.unique(task)} | {"all": task == task}
    return [
        {
            "task": name,
            "requests": int(rows.sum()),
            "prompt_tokens": float(test.prompts.prompt_tokens[rows].mean()),
            "answer_tokens": float(test.total_tokens[rows].mean()),
            "cut": float(test.cut[rows].mean()),
        }
        for name, rows in here.items()
    ]


def _report(results: LengthResults) -> str:
    test, tasks = results.test, results.tasks
    lines = [
        f"# Answer lengths of {results.provenance['model']}, predicted from prompts",
        "",
        f"{len(test)} test requests that nothing was trained on, "
        f"{test.cut.mean():.1%} of them ended by their max_tokens. The truth is the tokens that "
        "came, and every forecast knows the cap.",
    ]
    if tasks:
        lines += [
            "",
            f"Task classified from the prompt: {tasks.accuracy:.2%} (always the most frequent: "
            f"{tasks.majority:.2%}).",
        ]
    for scheme, buckets in results.buckets.items():
        methods = results.scores[scheme]
        shares = np.bincount(buckets.of(test.total_tokens), minlength=len(buckets)) / len(test)
        row = ["test requests", *(f"{share:.1%}" for share in shares)]
        lines += ["", f"## Buckets: {scheme}", ""]
        lines += [*markdown_table(["tokens", *buckets.names], [row]), ""]
        lines += [*_scores(methods), "", *_by_task(methods, test)]
    if results.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in results.notes)]
    return "\n".join([*lines, "", "![Scores of all methods](results.png)", ""])


def _scores(methods: dict[str, LengthScores]) -> list[str]:
    heads = ["method", "accuracy", "macro F1", "log loss", "CRPS, tokens", "MAE of the median"]
    rows = [
        [
            METHODS[name],
            f"{scores.accuracy:.2%}",
            f"{scores.macro_f1:.3f}",
            f"{scores.log_loss:.3f}",
            f"{scores.crps:.1f}",
            f"{scores.mae:.1f}",
            "–" if scores.concordance is None else f"{scores.concordance:.3f}",
            "–" if scores.coverage is None else f"{scores.coverage['80']:.1%}",
        ]
        for name, scores in methods.items()
    ]
    return markdown_table([*heads, "concordance", "80% covers"], rows)


def _by_task(methods: dict[str, LengthScores], test: AnsweredPrompts) -> list[str]:
    shown = [name for name in METHODS if name in methods and name != "kaplan_meier"]
    rows = []
    for row in _task_rows(test):
        task = row["task"]
        if row["requests"] >= _FEW:
            of = [methods[name] for name in shown]
            accuracies = [one.accuracy if task == "all" else one.by_task[task] for one in of]
            means = [f"{row[name]:.0f}" for name in ("requests", "prompt_tokens", "answer_tokens")]
            rows.append([task, *means, f"{row['cut']:.0%}", *(f"{x:.1%}" for x in accuracies)])
    heads = ["task", "test requests", "prompt tokens", "answer tokens", "cut"]
    return markdown_table([*heads, *(METHODS[name] for name in shown)], rows)


def _figure(results: LengthResults) -> Any:
    figure, panels = create_panels(2, 2, (5.5, 4.4), sharex=False)
    shown = (("accuracy", 100, "accuracy of the bucket, %"), ("crps", 1, "CRPS, tokens"))
    names = [name for name in METHODS if any(name in m for m in results.scores.values())]
    height = 0.8 / len(results.scores)
    for axes, (what, scale, title) in zip(panels, shown, strict=True):
        for j, (scheme, methods) in enumerate(results.scores.items()):
            places = np.arange(len(names)) + (j - (len(results.scores) - 1) / 2) * height
            values = [scale * getattr(methods[name], what) for name in names]
            axes.barh(places, values, height, label=scheme)
        axes.set_yticks(np.arange(len(names)), [METHODS[name] for name in names])
        finish_axes(axes, title)
    panels[0].invert_yaxis()
    bars, schemes = panels[0].get_legend_handles_labels()
    figure.legend(bars, schemes, loc="outside upper center", ncols=len(schemes), frameon=False)
    return figure


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
        split_seed: of the split; that of ``hidden_state`` if not set, or 0.
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
    torch.manual_seed(seed)  # the first classifier is drawn before its training seeds anything
    study = LengthStudy(split, chosen, described, encoder, forest, shape, limit, seed, out)
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
