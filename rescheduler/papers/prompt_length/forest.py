"""Classifiers of a request by what is known before its first token, but for its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rescheduler.papers.prompt_length.prompt_table import Prompts

__all__ = ["BucketFrequencies", "ForestOptions", "LengthForest"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class BucketFrequencies:
    """Predict the training requests' shares of the buckets, whatever the prompt says.

    By task it is the baseline for every predictor that is given the task: Jain et al. find that
    the hint is what lifts their encoder from 5.5% to 79%.

    Args:
        prompts: of the training requests.
        found: [n] index of each one's bucket.
        labels: the buckets, in order.
        by_task: whether each task has shares of its own; a task that was not trained on has
            those of all.
    """

    def __init__(
        self, prompts: Prompts, found: IntArray, labels: Sequence[str], by_task: bool = False
    ) -> None:
        self.labels = tuple(labels)
        self.tasks = tuple(sorted(set(prompts.task)))
        self._overall = self._shares(found)
        task = np.array(prompts.task)
        self._of_task = {name: self._shares(found[task == name]) for name in self.tasks if by_task}

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return the shares for each prompt, [n, n_labels]."""
        return np.stack([self._of_task.get(task, self._overall) for task in prompts.task])

    def _shares(self, found: IntArray) -> FloatArray:
        counts = np.bincount(found, minlength=len(self.labels))
        shares: FloatArray = counts / counts.sum()
        return shares


@dataclass(frozen=True)
class ForestOptions:
    """How a forest is grown.

    Attributes:
        trees: of the forest.
        min_leaf: training requests in a leaf at least.
    """

    trees: int = 200
    min_leaf: int = 10

    def __post_init__(self) -> None:
        if min(self.trees, self.min_leaf) < 1:
            raise ValueError("a forest has trees, and training requests in every leaf")


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
        self.labels, self.tasks, self.nodes = tuple(labels), tuple(tasks), dict(nodes)

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
    place = {task: i for i, task in enumerate(tasks)}
    for task in prompts.task:
        if task not in place:
            raise ValueError(
                f"no request of the application {task!r} was trained on; known: {', '.join(tasks)}"
            )
    features = np.zeros((len(prompts), 1 + len(tasks)), dtype=np.float32)
    features[:, 0] = prompts.prompt_tokens
    features[np.arange(len(prompts)), [1 + place[task] for task in prompts.task]] = 1
    return features
