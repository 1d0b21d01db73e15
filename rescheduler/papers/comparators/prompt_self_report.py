"""Perception in Advance: the serving model is asked how long its answer will be."""

import re
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from data_collection.models import resolve_model
from predictor.evaluation.comparators import fitted, request_lengths
from predictor.training.row_table import RowTable
from rescheduler.papers.comparators.text_regressor import row_token_ids, serving_model_folder

QUESTION = (
    "Before responding to the above instruction, you have to predict the length of your "
    "response. Print only the estimated number of tokens in your response."
)


def parse_length(answer: str) -> int | None:
    """Return the first whole number in an answer (``1,200`` is one), or None."""
    found = re.search(r"\d+(,\d{3})*", answer)
    return int(found.group().replace(",", "")) if found else None


class PromptSelfReport:
    r"""Ask the serving model for the length of its answer before it answers (PiA).

    .. math:: \hat y = \max(0, \min(L, \text{max tokens}) - n)

    with L the number in the model's greedy answer, or the median total of the uncensored
    training requests where it named none. Nothing is trained. The method is Zheng et al. 2023
    (NeurIPS 36), as STAR §2.3 and Table 1 report it.

    Our reading: the question is one more user turn after the recorded conversation, in the
    serving model's own chat template, and its answer is read apart from the real one. So the
    recorded answer stays the one that the model gave without being asked, and every request
    costs one generation of at most ``max_new_tokens`` tokens however many rows it has.

    Args:
        serving_model: ``smollm2``, a Hugging Face id or a folder; the model that was served.
        batch_size: conversations asked at once.
        max_new_tokens: tokens of the answer that are read.
    """

    name = "prompt_self_report"

    def __init__(
        self, serving_model: str = "smollm2", batch_size: int = 8, max_new_tokens: int = 16
    ) -> None:
        self._serving_model = serving_model
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self._fallback: float | None = None
        self._said: dict[int, int | None] = {}

    @property
    def parameters(self) -> int:
        """Parameters of the serving model, which is loaded to count them."""
        return sum(weight.numel() for weight in self._model.parameters())

    @property
    def asked(self) -> int:
        """Requests asked by the last ``predict``."""
        return len(self._said)

    @property
    def parsed(self) -> int:
        """Of the requests asked, those whose answer had a number."""
        return sum(length is not None for length in self._said.values())

    @property
    def notes(self) -> list[str]:
        """How many answers could be read."""
        return [
            f"{self.name}: {self.parsed} of {self.asked} answers held a number; the others count "
            f"as the median training length, {self._fallback:.0f} tokens"
        ]

    def fit(self, train: RowTable, validation: RowTable) -> None:
        """Take the median total tokens of the training requests, for answers without a number.

        Raises:
            ValueError: no training request is uncensored.
        """
        total_tokens, censored = request_lengths(train)
        if censored.all():
            raise ValueError(f"{self.name}: none of {len(censored)} requests is uncensored")
        self._fallback = float(np.median(total_tokens[~censored]))

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return the reported length less the tokens generated, [n_rows], at least 0.

        Raises:
            RuntimeError: ``fit`` was not called.
            ValueError: token ids were not recorded, the rows are of another model, or the
                prompts do not end as the model's chat template ends them.
        """
        fallback = fitted(self._fallback, self.name)
        serving_model_folder(self._serving_model, rows.session)
        _, first_row = np.unique(rows.request, return_index=True)
        self._said = {}
        self._ask(rows, [int(row) for row in first_row])
        said = [self._said[int(request)] for request in rows.request]
        length = np.array([fallback if number is None else float(number) for number in said])
        left = np.minimum(length, rows.max_tokens) - rows.generated_tokens
        remaining: npt.NDArray[np.float32] = np.maximum(left, 0).astype(np.float32)
        return remaining

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(resolve_model(self._serving_model))
        if tokenizer.chat_template is None:
            raise ValueError(f"{self._serving_model} has no chat template to ask it with")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = "left"
        return tokenizer

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(self._serving_model))
        return model.to(device).eval()

    @cached_property
    def _turns(self) -> tuple[list[int], list[int]]:
        """Token ids that open the model's turn, and those that ask and open it again."""

        def render(users: list[str], opened: bool) -> str:
            conversation = [{"role": "user", "content": content} for content in users]
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=opened
                )
            )

        closed, opened = render(["A"], False), render(["A"], True)
        asked = render(["A", QUESTION], True)
        if not (opened.startswith(closed) and asked.startswith(closed)):
            raise ValueError(f"{self._serving_model}: its chat template takes no second user turn")
        opening, asking = (
            self._tokenizer(text[len(closed) :], add_special_tokens=False)["input_ids"]
            for text in (opened, asked)
        )
        return opening, asking

    def _conversation(self, rows: RowTable, row: int) -> list[int]:
        prompt, _ = row_token_ids(rows, row)
        opening, asking = self._turns
        ends = len(prompt) - len(opening)
        if prompt[ends:] != opening:
            raise ValueError(
                f"the prompt of request {rows.requests.request_id[int(rows.request[row])]} does "
                f"not end as the chat template of {self._serving_model} does: "
                f"{self._tokenizer.decode(prompt[ends:])!r}; only chat requests can be asked"
            )
        return prompt[:ends] + asking

    def _ask(self, rows: RowTable, new: list[int]) -> None:
        conversations = {row: self._conversation(rows, row) for row in new}
        by_length = sorted(new, key=lambda row: len(conversations[row]))
        for start in tqdm(
            range(0, len(new), self._batch_size), desc=self.name, unit="batch", disable=None
        ):
            batch = by_length[start : start + self._batch_size]
            asked = self._tokenizer.pad(
                {"input_ids": [conversations[row] for row in batch]}, return_tensors="pt"
            ).to(self._model.device)
            with torch.inference_mode():
                answered = self._model.generate(
                    **asked,
                    max_new_tokens=self._max_new_tokens,
                    do_sample=False,
                    pad_token_id=self._tokenizer.pad_token_id,
                )
            answers = self._tokenizer.batch_decode(
                answered[:, asked["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for row, answer in zip(batch, answers, strict=True):
                self._said[int(rows.request[row])] = parse_length(answer)
