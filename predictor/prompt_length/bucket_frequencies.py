"""What a classifier must beat: how often each bucket occurred, in all or by task."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from predictor.prompt_length.prompt_table import Prompts

__all__ = ["BucketFrequencies"]

FloatArray = npt.NDArray[np.float64]


class BucketFrequencies:
    """Predict the training requests' shares of the buckets, whatever the prompt says.

    By task it is the floor of everything that is told the task: Jain et al. find that the hint is
    what lifts their encoder from 5.5% to 79%.

    Args:
        prompts: of the training requests.
        found: [n] index of each one's bucket.
        labels: the buckets, in order.
        by_task: whether each task has shares of its own; a task that was not trained on has
            those of all.
    """

    def __init__(
        self,
        prompts: Prompts,
        found: npt.NDArray[np.int64],
        labels: Sequence[str],
        by_task: bool = False,
    ) -> None:
        self.labels = tuple(labels)
        self.tasks = tuple(sorted(set(prompts.task)))
        self._overall = self._shares(found)
        task = np.array(prompts.task)
        self._of_task = {name: self._shares(found[task == name]) for name in self.tasks if by_task}

    def probabilities(self, prompts: Prompts) -> FloatArray:
        """Return the shares for each prompt, [n, n_labels]."""
        return np.stack([self._of_task.get(task, self._overall) for task in prompts.task])

    def _shares(self, found: npt.NDArray[np.int64]) -> FloatArray:
        counts = np.bincount(found, minlength=len(self.labels))
        shares: FloatArray = counts / counts.sum()
        return shares
