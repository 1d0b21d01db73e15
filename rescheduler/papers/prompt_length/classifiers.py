"""Classifiers of prompts by length bucket or by task: a text encoder, and forests."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from rescheduler.cluster.registry import COUNT, POSITIVE, Checked
from rescheduler.papers.fine_tuning import (
    LabelledTexts,
    Precision,
    TextNetwork,
    fine_tune,
    load_pretrained,
    train_last_layers,
)
from rescheduler.papers.prompt_length.prompt_table import Prompts

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_BATCH = 32
_VALIDATION_BATCH = 64
_HEAD_RATE = 10.0
"""How much faster the new linear layer learns than the encoder."""


class EncoderClassifier(TextNetwork):
    r"""An encoder f, the mean of its states over the text, dropout, and a linear layer.

    .. math:: p = \operatorname{softmax}\Big(W \cdot \frac{1}{T} \sum_{t \le T} f(x)_t + b\Big)

    The paper (§4.1, C.7, C.8) fine-tunes DistilBERT; any encoder of Hugging Face will do. A long
    prompt keeps its beginning. The hint, "This is a QnA task" (C.5.2), is a second text after the
    encoder's separator, so that it is never what is cut.

    Args:
        backbone: a Hugging Face encoder without a head.
        tokenizer: its own.
        labels: the classes, in order.
        tasks: that a prompt may be of; only these can be hinted at.
        hinted: whether the texts carry the hint of their task.
        max_tokens: tokens of prompt and hint that are read.
        dropout: share of the mean state's values that training drops.

    Raises:
        ValueError: fewer than two labels, or more tokens than the encoder has positions.
    """

    def __init__(
        self,
        backbone: Any,
        tokenizer: Any,
        labels: Sequence[str],
        tasks: Sequence[str],
        hinted: bool = False,
        max_tokens: int = 128,
        dropout: float = 0.1,
    ) -> None:
        positions = getattr(backbone.config, "max_position_embeddings", max_tokens)
        if not 32 <= max_tokens <= positions:
            raise ValueError(f"the encoder reads 32 to {positions} tokens, not {max_tokens}")
        if len(labels) < 2:
            raise ValueError(f"nothing to classify: the only label is {', '.join(labels)!r}")
        super().__init__(backbone, tokenizer, len(labels), dropout)
        self.labels = tuple(labels)
        self.tasks = tuple(tasks)
        self.hinted = hinted
        self.max_tokens = max_tokens

    def token_ids(self, prompts: Prompts) -> list[list[int]]:
        """Return the encoder's tokens of each prompt, and of its hint if it has one.

        Raises:
            ValueError: a task is none of those that were trained on.
        """
        cut: dict[str, Any] = {"truncation": True, "max_length": self.max_tokens}
        texts = [list(prompts.text)]
        if self.hinted:
            refuse_unknown(
                prompts.task, self.tasks, "task", ". Predict the task, or leave the hint out"
            )
            texts.append([f"This is a {task} task" for task in prompts.task])
            cut["truncation"] = "only_first"
        return [list(ids) for ids in self.tokenizer(*texts, **cut)["input_ids"]]

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return P(label) of each prompt, [n, n_labels].

        Raises:
            ValueError: as `token_ids` does.
        """
        logits = torch.from_numpy(self.outputs(self.token_ids(prompts), _BATCH, "prompts"))
        found: FloatArray = logits.double().softmax(dim=1).numpy()
        return found

    def predicted(self, prompts: Prompts) -> list[str]:
        """Return the most probable label of each prompt."""
        return [self.labels[i] for i in self.probabilities(prompts).argmax(axis=1)]


def refuse_unknown(tasks: Sequence[str], known: Sequence[str], what: str, advice: str = "") -> None:
    """Refuse a task that was not trained on.

    Raises:
        ValueError: names it.
    """
    for task in tasks:
        if task not in known:
            raise ValueError(
                f"no request of the {what} {task!r} was trained on; known: "
                f"{', '.join(known)}{advice}"
            )


@dataclass(frozen=True)
class EncoderOptions(
    Checked, epochs=COUNT, patience=COUNT, learning_rate=POSITIVE, batch_size=COUNT
):
    """An encoder and how it is fine-tuned.

    Attributes:
        model: ``minilm``, a Hugging Face id such as distilbert/distilbert-base-uncased (the
            paper's), or a folder.
        max_tokens: tokens of prompt and hint that are read.
        train_layers: only the last so many of the encoder's layers learn, and not its
            embeddings; None: everything learns, as in the paper.
        dropout: on the mean state.
        epochs: passes over the training prompts; 6 in the paper (C.7).
        patience: passes without a lower validation loss before stopping.
        learning_rate: AdamW's for the encoder, falling to 0 over the passes; the linear layer's
            is ten times that.
        batch_size: prompts in a step.
        precision: of the training's arithmetic; ``bf16-mixed`` halves its time on processors
            that have it (AVX-512 BF16, AMX). Predictions are always computed in full.
    """

    model: str = "minilm"
    max_tokens: int = 128
    train_layers: int | None = None
    dropout: float = 0.1
    epochs: int = 6
    patience: int = 2
    learning_rate: float = 5e-5
    batch_size: int = 16
    precision: Precision = "32-true"

    def classifier(
        self, labels: Sequence[str], tasks: Sequence[str], hinted: bool
    ) -> EncoderClassifier:
        """Return an untrained classifier on the pre-trained encoder.

        Raises:
            ValueError: the encoder cannot be found or loaded, or as `EncoderClassifier`.
        """
        backbone, tokenizer = load_pretrained(self.model)
        return EncoderClassifier(
            backbone, tokenizer, labels, tasks, hinted, self.max_tokens, self.dropout
        )


def train_classifier(
    classifier: EncoderClassifier,
    train: LabelledTexts,
    validation: LabelledTexts,
    options: EncoderOptions,
    folder: Path,
    seed: int,
) -> dict[str, Any]:
    r"""Minimise the cross-entropy of the labels, :math:`-\frac{1}{N} \sum_i \log p_{i, y_i}`.

    The classifier is left with the weights of the best pass by ``validation``. Logs go to
    ``folder``; ``seed`` is of the dropout and the order of batches.

    Returns:
        What the checkpoint's card reports: passes, seconds, validation loss.
    """
    started = time.monotonic()
    L.seed_everything(seed, verbose=False)
    if options.train_layers is not None:
        train_last_layers(classifier.backbone, options.train_layers)
    learning = [weight for weight in classifier.backbone.parameters() if weight.requires_grad]
    head = {"params": classifier.head.parameters(), "lr": _HEAD_RATE * options.learning_rate}
    optimizer = torch.optim.AdamW([{"params": learning, "lr": options.learning_rate}, head])
    batches = classifier.batches(train, options.batch_size, np.random.default_rng(seed))

    def losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = nn.functional.cross_entropy(logits, labels)
        return loss, loss.detach()

    _, validated = fine_tune(
        classifier,
        batches,
        classifier.batches(validation, _VALIDATION_BATCH),
        losses,
        optimizer,
        scheduler=torch.optim.lr_scheduler.LinearLR(
            optimizer, 1.0, 0.0, total_iters=options.epochs * len(batches)
        ),
        max_epochs=options.epochs,
        patience=options.patience,
        precision=options.precision,
        logger=CSVLogger(folder / "logs", name="csv"),
    )
    classifier.requires_grad_(True)
    seconds = round(time.monotonic() - started, 1)
    return {"epochs": len(validated), "training_seconds": seconds, "val_loss": min(validated)}


class BucketFrequencies:
    """Predict the training requests' shares of the buckets, whatever the prompt says.

    By task it is the baseline for every predictor that is given the task: Jain et al. find that
    the hint is what lifts their encoder from 5.5% to 79%.

    Args:
        tasks: of the training requests; one alone to overlook them.
        found: [n] index of each one's bucket.
        n_labels: buckets.
    """

    def __init__(self, tasks: Sequence[str], found: IntArray, n_labels: int) -> None:
        task = np.array(tasks)
        of_task = {name: found[task == name] for name in set(tasks)} | {None: found}
        self._shares = {
            name: np.bincount(own, minlength=n_labels) / len(own) for name, own in of_task.items()
        }

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return the shares for each prompt, [n, n_labels]; an unknown task has those of all."""
        return np.stack([self._shares.get(task, self._shares[None]) for task in prompts.task])


@dataclass(frozen=True)
class ForestOptions(Checked, trees=COUNT, min_leaf=COUNT):
    """How a forest is grown.

    Attributes:
        trees: of the forest.
        min_leaf: training requests in a leaf at least.
    """

    trees: int = 200
    min_leaf: int = 10


class LengthForest:
    """Predict an answer's length bucket from prompt tokens and application (Jain et al. C.12).

    Grown by scikit-learn and kept as plain arrays: nodes of all trees one after another, so that
    a checkpoint is read by any version, and runs no code. Features are the prompt's tokens, and
    one for each application.

    Args:
        labels: the classes, in order.
        tasks: the applications.
        nodes: ``roots`` [n_trees]; ``left``, ``right`` [n_nodes], -1 in a leaf; ``feature``,
            ``threshold`` [n_nodes], a request goes left where its feature is at most that;
            ``share`` [n_nodes, n_labels] of the training requests there.
    """

    def __init__(
        self, labels: Sequence[str], tasks: Sequence[str], nodes: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        self.labels = tuple(labels)
        self.tasks = tuple(tasks)
        self.nodes = dict(nodes)

    @classmethod
    def grow(
        cls,
        prompts: Prompts,
        found: IntArray,
        labels: Sequence[str],
        tasks: Sequence[str],
        options: ForestOptions,
        seed: int,
    ) -> "LengthForest":
        """Grow a forest from training requests, whose labels' indices are ``found``, [n].

        Raises:
            ValueError: a task is none of ``tasks``.
        """
        from sklearn.ensemble import RandomForestClassifier

        model = RandomForestClassifier(
            options.trees, min_samples_leaf=options.min_leaf, random_state=seed, n_jobs=1
        )
        model.fit(_features(prompts, tasks), found)
        parts: dict[str, list[npt.NDArray[Any]]] = {}
        roots, start = [], 0
        for estimator in model.estimators_:
            tree = estimator.tree_
            counts = np.zeros((tree.node_count, len(labels)))
            counts[:, model.classes_] = tree.value[:, 0, :]
            inner = tree.children_left >= 0
            columns = {
                "left": np.where(inner, tree.children_left + start, -1),
                "right": np.where(inner, tree.children_right + start, -1),
                "feature": np.where(inner, tree.feature, 0),
                "threshold": tree.threshold,
                "share": counts / counts.sum(axis=1, keepdims=True),
            }
            for name, column in columns.items():
                parts.setdefault(name, []).append(column)
            roots.append(start)
            start += tree.node_count
        nodes = {name: np.concatenate(columns) for name, columns in parts.items()}
        return cls(labels, tasks, {"roots": np.array(roots), **nodes})

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return P(label) of each request, the mean over the trees, [n, n_labels].

        Raises:
            ValueError: a task is none of those that were trained on.
        """
        features, nodes = _features(prompts, self.tasks), self.nodes
        rows = np.arange(len(prompts))[:, None]
        node = np.tile(nodes["roots"], (len(prompts), 1))
        while (inner := nodes["left"][node] >= 0).any():
            lower = features[rows, nodes["feature"][node]] <= nodes["threshold"][node]
            child = np.where(lower, nodes["left"][node], nodes["right"][node])
            node = np.where(inner, child, node)
        mean: FloatArray = nodes["share"][node].mean(axis=1)
        return mean


def _features(prompts: Prompts, tasks: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return prompt tokens and one column a task, [n, 1 + n_tasks]."""
    refuse_unknown(prompts.task, tasks, "application")
    place = {task: i for i, task in enumerate(tasks)}
    features = np.zeros((len(prompts), 1 + len(tasks)), dtype=np.float32)
    features[:, 0] = prompts.prompt_tokens
    features[np.arange(len(prompts)), [1 + place[task] for task in prompts.task]] = 1
    return features
