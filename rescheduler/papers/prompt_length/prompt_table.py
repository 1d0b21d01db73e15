"""Prompts as texts, and what a recorded dataset says was answered to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_collection.capture.requests import parse_request_id
from data_collection.dataset.dataset_schema import SplitName, split_requests
from data_collection.workload.engine_options import ID_PREFIX
from data_collection.workload.prompts import load_prompts
from predictor.evaluation.survival_metrics import Outcomes
from predictor.training.row_table import RowTable, load_rows

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is known of n requests before their first token.

    Attributes:
        text: what their users wrote.
        task: what kind of request each is, or which application sent it.
        prompt_tokens: [n] in the serving model's tokens.
        max_tokens: [n] that they may generate.
    """

    text: Sequence[str]
    task: Sequence[str]
    prompt_tokens: IntArray
    max_tokens: IntArray

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.text)

    def with_tasks(self, task: Sequence[str]) -> "Prompts":
        """Return the same requests with other tasks, such as predicted ones."""
        return replace(self, task=task)


@dataclass(frozen=True, slots=True)
class AnsweredPrompts:
    """Requests of a dataset that ran to their end, each with the row of its prefill, [n].

    One that ended at its ``max_tokens`` counts with the tokens that came: those are what a
    scheduler would have wanted to know, and every forecast knows the cap. Those cut otherwise
    are left out.
    """

    prompts: Prompts
    rows: RowTable

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.prompts)

    @property
    def total_tokens(self) -> IntArray:
        """Tokens that each request generated, [n]."""
        return self.rows.remaining_tokens

    @property
    def cut(self) -> npt.NDArray[np.bool_]:
        """Whether its ``max_tokens`` ended it, [n]."""
        return self.rows.censored

    @property
    def outcomes(self) -> Outcomes:
        """What came, for measures of forecasts."""
        return Outcomes(self.total_tokens, self.cut, self.rows.tokens_left())


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """A dataset's answered prompts, in the parts of its own split.

    Attributes:
        parts: training, validation and test.
        training_rows: rows of the training part, those past the prefill too: predictors on
            hidden states that trained on so many rows had the same split.
        unmatched: requests whose prompt the file does not have.
        left_out: requests that were cut otherwise than by ``max_tokens``, or have no row at
            their prefill.
    """

    parts: dict[SplitName, AnsweredPrompts]
    training_rows: int
    unmatched: int
    left_out: int

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of all requests, in order."""
        return tuple(sorted({t for part in self.parts.values() for t in part.prompts.task}))


def load_answered_prompts(
    dataset: Path, prompts: str, split_seed: int, task_names: Mapping[str, str]
) -> PromptSplit:
    """Join a recorded dataset with the file of prompts that it was collected from.

    Args:
        dataset: folder recorded by ``headway collect``.
        prompts: what ``headway collect --prompts`` was given; joined by the prompts' ids.
        split_seed: of the 70/15/15 split by request, which predictors on hidden states share.
        task_names: what to call tasks; others keep their name, with spaces for underscores.

    Raises:
        DatasetError: the folder is no dataset, or its split leaves a part empty.
        PromptError: the prompts cannot be read.
        ValueError: no request is of one of the prompts, or a part has none of them.
    """
    asked = {prompt.id: prompt for prompt in load_prompts(prompts)}
    table = load_rows(dataset)
    names = [
        parse_request_id(name).external_id.removeprefix(ID_PREFIX)
        for name in table.requests.request_id
    ]
    known = np.array([name in asked for name in names])
    if not known.any():
        raise ValueError(
            f"{dataset}: none of its {len(names)} requests is of a prompt in {prompts}: they are "
            f"called {names[0]!r} and the like, the prompts {next(iter(asked))!r}"
        )
    prefills = np.flatnonzero(table.generated_tokens == 0)
    _, first = np.unique(table.request[prefills], return_index=True)
    whole = np.isin(table.requests.finish_reason, ("stop", "length"))
    rows = table.select(prefills[first])
    rows = rows.select((known & whole)[rows.request])
    parts: dict[SplitName, AnsweredPrompts] = {}
    split = split_requests(table.requests.group, split_seed)
    for part, requests in split.items():
        here = rows.select(np.isin(rows.request, requests))
        if len(here) == 0:
            raise ValueError(f"{dataset}: the {part} part has no answered prompt of {prompts}")
        of_prompt = [asked[names[i]] for i in here.request]
        tasks = [prompt.task or "other" for prompt in of_prompt]
        answered = Prompts(
            [prompt.text for prompt in of_prompt],
            [task_names.get(task, task.replace("_", " ")) for task in tasks],
            here.prompt_tokens,
            here.generated_tokens + here.tokens_left(),
        )
        parts[part] = AnsweredPrompts(answered, here)
    return PromptSplit(
        parts,
        training_rows=int(np.isin(table.request, split["train"]).sum()),
        unmatched=int((~known).sum()),
        left_out=int(known.sum()) - len(rows),
    )
