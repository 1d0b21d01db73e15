"""`headway papers train-length`: predict answers' lengths from prompts, beside the hidden state."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
    Scores,
    Shape,
    accuracy_by_task,
    length_scores,
)
from rescheduler.papers.prompt_length.classifiers import (
    BucketFrequencies,
    EncoderOptions,
    ForestOptions,
    LengthForest,
    train_classifier,
)
from rescheduler.papers.prompt_length.length_predictor import (
    LengthClassifier,
    load_length_predictor,
    load_task_classifier,
    save_classifier,
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

Provenance = dict[str, Any]


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

    def tasks(self) -> tuple[dict[str, Any], Prompts] | None:
        """Return how well tasks are classified, and the test prompts with the predicted tasks.

        The scores are ``accuracy``, the share of the test prompts whose task was classified
        correctly (Jain et al. 2025, C.8), ``by_task``, and ``majority``, the share of the most
        frequent training task. None where all requests are of one task: there is nothing to
        classify, and no hint to give.
        """
        if len(self.split.tasks) < 2:
            return None
        test = self._test.prompts
        classifier = self._encoder("task", None, hinted=False)
        predicted = [self.split.tasks[i] for i in classifier.probabilities(test).argmax(axis=1)]
        right = np.array(predicted) == np.array(test.task)
        names, counts = np.unique(self._train.prompts.task, return_counts=True)
        scores = {
            "accuracy": float(right.mean()),
            "majority": float((np.array(test.task) == names[counts.argmax()]).mean()),
            "by_task": accuracy_by_task(right, self._test),
        }
        return scores, test.with_tasks(predicted)

    def lengths(
        self,
        scheme: str,
        predicted_tasks: Prompts | None,
        hidden_state: HiddenStateMLP | None,
    ) -> dict[str, Scores]:
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
            "majority": (BucketFrequencies((), found, len(buckets)), test),
            "task_majority": (BucketFrequencies(train.prompts.task, found, len(buckets)), test),
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
        kaplan_meier = KaplanMeier()
        kaplan_meier.fit(train.rows, train.rows)
        unbucketed: dict[str, Forecast] = {"kaplan_meier": kaplan_meier.forecast(self._test.rows)}
        if hidden_state is not None:
            unbucketed["hidden_state"] = hidden_state.forecast(request_rows(self._test.rows))
        for name, curves in unbucketed.items():
            scores[name] = length_scores(buckets, buckets.masses(curves), curves, self._test)
        return scores

    def _encoder(self, name: str, curve: BucketCurve | None, hinted: bool) -> LengthClassifier:
        """Return an encoder of the curve's buckets (§4.1), or without a curve of tasks (C.8)."""
        tasks = self.split.tasks

        def trained() -> tuple[LengthClassifier, Provenance]:
            labels = tasks if curve is None else curve.buckets.names
            classifier = self.encoder.classifier(labels, tasks, hinted)
            print(f"{name}: fine-tuning on {len(self._train)} prompts", flush=True)
            train, validation = (
                LabelledTexts(
                    classifier.token_ids(part.prompts),
                    np.searchsorted(tasks, part.prompts.task)
                    if curve is None
                    else curve.buckets.of(part.total_tokens),
                )
                for part in (self._train, self.split.parts["validation"])
            )
            folder = self.out / name
            return classifier, train_classifier(
                classifier, train, validation, self.encoder, folder, self.seed
            )

        own = {} if curve is None else {"hinted": hinted}
        return self._kept(name, curve, own | asdict(self.encoder), trained)

    def _forest(self, name: str, curve: BucketCurve) -> LengthClassifier:
        """Return a forest on prompt length and application (C.12)."""
        train, tasks = self._train, self.split.tasks
        found, names = curve.buckets.of(train.total_tokens), curve.buckets.names

        def grown() -> tuple[LengthClassifier, Provenance]:
            return LengthForest.grow(train.prompts, found, names, tasks, self.forest, self.seed), {}

        return self._kept(name, curve, asdict(self.forest), grown)

    def _kept(
        self,
        name: str,
        curve: BucketCurve | None,
        own: dict[str, Any],
        train: Callable[[], tuple[LengthClassifier, Provenance]],
    ) -> LengthClassifier:
        """Return a variant, which is trained and saved unless an earlier run has done so.

        ``own`` are its settings; with the curve and the study's they are all that it depends on.
        """
        folder = self.out / name
        described = {} if curve is None else {"curve": asdict(curve)}
        everything = {**self.described, "seed": self.seed, **described, **own}
        settings = json.loads(json.dumps(everything))
        if (folder / "config.json").is_file():
            if read_config(folder).get("provenance", {}).get("settings") != settings:
                raise ValueError(
                    f"{folder} was trained with other settings: give another --out, or move it away"
                )
            print(f"{name}: trained already", flush=True)
            if curve is None:
                return load_task_classifier(folder)
            return load_length_predictor(folder).classifier
        classifier, trained = train()
        provenance = {"settings": settings, **trained, **_made()}
        save_classifier(classifier, curve, self._model, provenance, folder)
        return classifier


def _made() -> Provenance:
    return {"commit": source_commit(), "versions": versions(), "machine": machine()}


_FEW = 10
"""Test requests below which a task has no row of its own: its accuracies would say nothing."""


def write_results(
    test: AnsweredPrompts,
    buckets: Mapping[str, LengthBuckets],
    scores: Mapping[str, Mapping[str, Scores]],
    tasks: dict[str, Any] | None,
    notes: list[str],
    provenance: Provenance,
    out: Path,
) -> None:
    """Write ``results.json``, ``report.md`` and ``results.png``, and print the report.

    ``scores`` are by the choice of buckets, then by method.
    """
    document = {
        "buckets": {name: list(ranges.edges) for name, ranges in buckets.items()},
        "scores": scores,
        "tasks": tasks,
        "test": _task_rows(test),
        "notes": notes,
        "provenance": provenance,
    }
    report = _report(test, buckets, scores, tasks, notes, provenance["model"])
    texts = {"results.json": json.dumps(document, indent=1) + "\n", "report.md": report}
    figures = {"results.png": _figure(scores)}
    write_report(out, texts, figures)
    print(report)
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


def _report(
    test: AnsweredPrompts,
    choices: Mapping[str, LengthBuckets],
    scores: Mapping[str, Mapping[str, Scores]],
    tasks: dict[str, Any] | None,
    notes: list[str],
    model: str,
) -> str:
    lines = [
        f"# Answer lengths of {model}, predicted from prompts",
        "",
        f"{len(test)} test requests that nothing was trained on, "
        f"{test.cut.mean():.1%} of them ended by their max_tokens. The truth is the tokens that "
        "came, and every forecast knows the cap.",
    ]
    if tasks:
        lines += [
            "",
            f"Task classified from the prompt: {tasks['accuracy']:.2%} (always the most frequent: "
            f"{tasks['majority']:.2%}).",
        ]
    for scheme, buckets in choices.items():
        methods = scores[scheme]
        shares = np.bincount(buckets.of(test.total_tokens), minlength=len(buckets)) / len(test)
        row = ["test requests", *(f"{share:.1%}" for share in shares)]
        lines += ["", f"## Buckets: {scheme}", ""]
        lines += [*markdown_table(["tokens", *buckets.names], [row]), ""]
        lines += [*_scores(methods), "", *_by_task(methods, test)]
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return "\n".join([*lines, "", "![Scores of all methods](results.png)", ""])


def _scores(methods: Mapping[str, Scores]) -> list[str]:
    heads = ["method", "accuracy", "macro F1", "log loss", "CRPS, tokens", "MAE of the median"]
    forms = {"accuracy": ".2%", "macro_f1": ".3f", "log_loss": ".3f", "crps": ".1f", "mae": ".1f"}
    rows = []
    for name, scores in methods.items():
        ranked, covered = scores["concordance"], scores["coverage"]
        shown = [format(scores[measure], form) for measure, form in forms.items()]
        last = [
            "–" if ranked is None else f"{ranked:.3f}",
            "–" if covered is None else f"{covered['80']:.1%}",
        ]
        rows.append([METHODS[name], *shown, *last])
    return markdown_table([*heads, "concordance", "80% covers"], rows)


def _by_task(methods: Mapping[str, Scores], test: AnsweredPrompts) -> list[str]:
    shown = [name for name in METHODS if name in methods and name != "kaplan_meier"]
    rows = []
    for row in _task_rows(test):
        task = row["task"]
        if row["requests"] >= _FEW:
            of = [methods[name] for name in shown]
            accuracies = [
                scores["accuracy"] if task == "all" else scores["by_task"][task] for scores in of
            ]
            means = [f"{row[name]:.0f}" for name in ("requests", "prompt_tokens", "answer_tokens")]
            rows.append([task, *means, f"{row['cut']:.0%}", *(f"{x:.1%}" for x in accuracies)])
    heads = ["task", "test requests", "prompt tokens", "answer tokens", "cut"]
    return markdown_table([*heads, *(METHODS[name] for name in shown)], rows)


def _figure(scores: Mapping[str, Mapping[str, Scores]]) -> Any:
    figure, panels = create_panels(2, 2, (5.5, 4.4), sharex=False)
    shown = (("accuracy", 100, "accuracy of the bucket, %"), ("crps", 1, "CRPS, tokens"))
    names = [name for name in METHODS if any(name in m for m in scores.values())]
    height = 0.8 / len(scores)
    for axes, (what, scale, title) in zip(panels, shown, strict=True):
        for j, (scheme, methods) in enumerate(scores.items()):
            places = np.arange(len(names)) + (j - (len(scores) - 1) / 2) * height
            values = [scale * methods[name][what] for name in names]
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
    seed: int = 0,
) -> None:
    """Train and measure predictors of answer lengths that read the prompt (Jain et al. 2025).

    For each choice of buckets it trains a fine-tuned encoder without and with a hint of the task,
    and a random forest on prompt length and application. It measures them, and what they must
    beat, on the same test requests. ``hidden_state`` was not trained on these requests either.
    Writes one checkpoint a variant, ``results.json``, ``report.md`` and a figure below OUT. Run it
    again to go on after an interruption: variants that are there are only measured.

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
        **_made(),
    }
    write_results(split.parts["test"], chosen, scores, tasks, notes, provenance, out)


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
