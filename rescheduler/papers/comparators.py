"""What STAR's predictor is measured against (Table 1): models that read text, and self-reports."""

import logging
import re
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from tqdm import tqdm

from data_collection.dataset.dataset_schema import Session
from data_collection.models import identify, resolve_model
from predictor.evaluation.comparators import fitted, request_lengths
from predictor.training.row_table import RowTable
from rescheduler.papers.fine_tuning import (
    LabelledTexts,
    TextNetwork,
    fine_tune,
    load_pretrained,
    train_last_layers,
)

logger = logging.getLogger("headway.comparators")


@dataclass(frozen=True)
class FineTuning:
    """How an auxiliary model is trained.

    Attributes:
        max_rows: training rows, a random subsample where there are more.
        max_validation_rows: validation rows, likewise.
        max_epochs: passes over the training rows; 100 in the paper.
        patience: passes without a better validation MAE before stopping; 10 in the paper.
        batch_size: rows in a mini-batch.
        learning_rate: AdamW's, constant.
        max_minutes: wall time after which no further mini-batch starts; the last pass over the
            validation rows comes on top.
        seed: of the subsamples, the shuffling and the dropout.
    """

    max_rows: int
    max_validation_rows: int
    learning_rate: float
    max_epochs: int = 100
    patience: int = 10
    batch_size: int = 16
    max_minutes: float = 30.0
    seed: int = 0


class TextRegressor:
    r"""An auxiliary model f with a linear head, trained on L1 as in STAR §4.4.

    .. math:: \min_\theta \frac{1}{N} \sum_i | f_\theta(x_i) - y_i / s |, \qquad
        \hat y = \max(0, s\, f_\theta(x))

    :math:`x_i` is the text of row i, the prompt and what was generated so far, in the auxiliary
    model's tokens. It is cut after ``max_tokens``, so that the beginning stays and the newest
    text is lost: the reason the paper gives (§4.3) for the error on long requests. The scale
    s, the mean remaining tokens of the training rows, only conditions the optimisation.

    Args:
        network: of its weights, those that require a gradient are trained.
        limit: tokens that the network can read.
        model: what it is called in errors.
        serving_model: ``smollm2``, a Hugging Face id or a folder; the model that was served,
            for the text of recorded token ids.
        max_tokens: tokens of the text that are read.
        settings: how to train.

    Attributes:
        training_seconds: wall time of the last ``fit``.
        training_loss: mean absolute error in tokens during each pass of the last ``fit``.
        validation_mae: mean absolute error in tokens after each pass.

    Raises:
        ValueError: ``max_tokens`` is over the limit.
    """

    name: str

    def __init__(
        self,
        network: TextNetwork,
        limit: int,
        model: str,
        serving_model: str,
        max_tokens: int,
        settings: FineTuning,
    ) -> None:
        if max_tokens > limit:
            raise ValueError(f"{model} reads {limit} tokens here, max_tokens is {max_tokens}")
        self.training_seconds = 0.0
        self.training_loss: list[float] = []
        self.validation_mae: list[float] = []
        self._network = network
        self._serving_model = serving_model
        self._max_tokens = max_tokens
        self._settings = settings
        self._scale: float | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the auxiliary model and its head, frozen ones included."""
        return sum(weight.numel() for weight in self._network.parameters())

    @property
    def notes(self) -> list[str]:
        """On how much it trained, and how much text it reads."""
        return [
            f"{self.name}: fine-tuned on at most {self._settings.max_rows} training rows for "
            f"{len(self.validation_mae)} passes ({self.training_seconds:.0f} s), reads the first "
            f"{self._max_tokens} tokens of prompt and answer"
        ]

    def fit(self, train: RowTable, validation: RowTable) -> None:
        """Fine-tune, and keep the weights with the lowest validation MAE.

        A second call goes on from the weights that the first one found.

        Raises:
            ValueError: token ids were not recorded, the rows are of another model, or one of
                the two tables has no request that ran to its end.
        """
        started = time.monotonic()
        settings, network = self._settings, self._network
        order = np.random.default_rng(settings.seed)
        train = self._subsample("training", train, settings.max_rows, order)
        validation = self._subsample("validation", validation, settings.max_validation_rows, order)
        train_texts, validation_texts = (
            LabelledTexts(self._inputs(rows), rows.remaining_tokens.astype(np.float32))
            for rows in (train, validation)
        )
        scale = self._scale = max(1.0, float(train_texts.labels.mean()))
        nn.init.zeros_(network.head.weight)
        nn.init.constant_(network.head.bias, float(np.median(train_texts.labels)) / scale)
        learning = [weight for weight in network.parameters() if weight.requires_grad]

        def losses(
            outputs: torch.Tensor, labels: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            left = outputs.squeeze(-1)
            tokens = (scale * left.detach()).clamp(min=0)
            return nn.functional.l1_loss(left, labels / scale), (tokens - labels).abs().mean()

        own = torch.Generator()  # leaves the random numbers of the dropout alone
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(settings.seed)
            self.training_loss, self.validation_mae = fine_tune(
                network,
                network.batches(train_texts, settings.batch_size, order, False, own),
                network.batches(validation_texts, settings.batch_size, generator=own),
                losses,
                torch.optim.AdamW(learning, lr=settings.learning_rate),
                max_epochs=settings.max_epochs,
                patience=settings.patience,
                max_seconds=60 * settings.max_minutes - (time.monotonic() - started),
            )
        self.training_seconds = time.monotonic() - started

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return predicted remaining tokens, [n_rows].

        Raises:
            RuntimeError: ``fit`` was not called.
            ValueError: token ids were not recorded, or the rows are of another model.
        """
        scale = fitted(self._scale, self.name)
        inputs = [tuple(ids) for ids in self._inputs(rows)]
        distinct = sorted(set(inputs), key=len)  # rows alike once truncated
        place = {ids: i for i, ids in enumerate(distinct)}
        outputs = self._network.outputs(distinct, self._settings.batch_size, self.name)[:, 0]
        tokens: npt.NDArray[np.float32] = np.maximum(outputs * np.float32(scale), 0)
        return tokens[np.array([place[ids] for ids in inputs], dtype=np.int64)]

    def _subsample(
        self, part: str, rows: RowTable, limit: int, order: np.random.Generator
    ) -> RowTable:
        known = rows.ran_to_their_end()
        if len(known) == 0:
            raise ValueError(f"{self.name}: no request of {len(rows)} {part} rows ran to its end")
        if len(known) > limit:
            logger.info("%s: %d of %d %s rows", self.name, limit, len(known), part)
        return known.select(order.permutation(len(known))[:limit])

    def _inputs(self, rows: RowTable) -> list[list[int]]:
        """Return the auxiliary model's token ids of each row, at most ``max_tokens``."""
        from transformers import AutoTokenizer

        folder = serving_model_folder(self._serving_model, rows.session)
        serving_tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        texts = []
        for i in range(len(rows)):
            prompt, generated = row_token_ids(rows, i)
            texts.append(serving_tokenizer.decode(prompt + generated, skip_special_tokens=True))
        if not texts:
            return []
        options = {"truncation": True, "max_length": self._max_tokens}
        return list(self._network.tokenizer(texts, **options)["input_ids"])


def row_token_ids(rows: RowTable, i: int) -> tuple[list[int], list[int]]:
    """Return the token ids of row i's prompt, and those of the n tokens generated so far.

    Raises:
        ValueError: the dataset was recorded without token ids.
    """
    request = int(rows.request[i])
    prompt = rows.requests.prompt_token_ids[request]
    output = rows.requests.output_token_ids[request]
    if prompt is None or output is None:
        raise ValueError(
            f"request {rows.requests.request_id[request]} was recorded without token ids, so "
            "its text is unknown: collect with token ids, or leave out comparators that read text"
        )
    return list(prompt), list(output[: int(rows.generated_tokens[i])])


def serving_model_folder(serving_model: str, session: Session) -> str:
    """Return what transformers loads for the model that the rows were recorded from.

    Raises:
        ValueError: it is another model, whose tokens would spell another text.
    """
    folder = resolve_model(serving_model)
    found = identify(folder).name
    if found != session.model:
        raise ValueError(
            f"serving_model is {found}, the rows were recorded from {session.model}: "
            "give the model that was served"
        )
    return folder


_ENCODER: dict[str, Any] = {"max_rows": 4000, "max_validation_rows": 500, "learning_rate": 5e-5}
_CAUSAL_LM: dict[str, Any] = {"max_rows": 1500, "max_validation_rows": 200, "learning_rate": 1e-4}
"""How each is fine-tuned where its options do not say otherwise."""

_PAPER_LIMIT = 1024
"""Tokens that STAR §4.3 gives its opt-125m."""


class AuxiliaryEncoder(TextRegressor):
    """An encoder fine-tuned to read the text of a row (μ-Serve's role in STAR §4.4, Table 1).

    The method is Qiu et al. 2024, with bert-base-uncased in both papers. The default here is
    MiniLM, a distilled BERT of 22.7 million parameters that two processor cores can fine-tune;
    ``model="google-bert/bert-base-uncased"`` with ``max_tokens=512`` is the paper's.

    Args:
        model: ``minilm``, a Hugging Face id of an encoder, or a folder.
        serving_model: the model that was served, for the text of recorded token ids.
        max_tokens: tokens of the text that are read, from its beginning; up to the encoder's
            number of positions (512).
        fine_tuning: options of `FineTuning`.

    Raises:
        ValueError: the model is unknown, or has fewer positions than ``max_tokens``.
    """

    name = "auxiliary_encoder"

    def __init__(
        self,
        model: str = "minilm",
        serving_model: str = "smollm2",
        max_tokens: int = 256,
        **fine_tuning: Any,
    ) -> None:
        network = TextNetwork(*load_pretrained(model), n_outputs=1)
        limit = network.backbone.config.max_position_embeddings
        settings = FineTuning(**_ENCODER | fine_tuning)
        super().__init__(network, limit, model, serving_model, max_tokens, settings)


class AuxiliaryCausalLM(TextRegressor):
    """A small causal LM fine-tuned to read a row's text (TetriInfer's role in STAR §4.4, Table 1).

    The method is Hu et al. 2024, with opt-125m in both papers; its last token's state, which
    has seen the whole text, goes through a linear head. The default here is SmolLM2-135M with
    all but the last two layers frozen, which two processor cores can fine-tune;
    ``model="facebook/opt-125m"``, ``max_tokens=1024``, ``train_layers=12`` is the paper's.

    Args:
        model: ``smollm2``, a Hugging Face id of a causal LM, or a folder.
        serving_model: the model that was served, for the text of recorded token ids.
        max_tokens: tokens of the text that are read, from its beginning; up to 1024 as in the
            paper, or the model's number of positions where that is less.
        train_layers: layers from the top that are fine-tuned with the head.
        fine_tuning: options of `FineTuning`.

    Raises:
        ValueError: the model is unknown, has fewer layers than ``train_layers``, or
            ``max_tokens`` is over the limit.
    """

    name = "auxiliary_causal_lm"

    def __init__(
        self,
        model: str = "smollm2",
        serving_model: str = "smollm2",
        max_tokens: int = 256,
        train_layers: int = 2,
        **fine_tuning: Any,
    ) -> None:
        network = TextNetwork(*load_pretrained(model), n_outputs=1, last_state=True)
        limit = min(_PAPER_LIMIT, network.backbone.config.max_position_embeddings)
        train_last_layers(network.backbone, train_layers)
        settings = FineTuning(**_CAUSAL_LM | fine_tuning)
        super().__init__(network, limit, model, serving_model, max_tokens, settings)


QUESTION = (
    "Before responding to the above instruction, you have to predict the length of your "
    "response. Print only the estimated number of tokens in your response."
)


_ANSWER_TOKENS = 16
"""Tokens of its answer that are read."""


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
    costs one generation of at most 16 tokens however many rows it has.

    Args:
        serving_model: ``smollm2``, a Hugging Face id or a folder; the model that was served.
        batch_size: conversations asked at once.
    """

    name = "prompt_self_report"

    def __init__(self, serving_model: str = "smollm2", batch_size: int = 8) -> None:
        self._serving_model = serving_model
        self._batch_size = batch_size
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
        requests, first_row = np.unique(rows.request, return_index=True)
        answers = self._answers([self._conversation(rows, int(row)) for row in first_row])
        self._said = dict(zip(requests.tolist(), map(parse_length, answers), strict=True))
        said = [self._said[request] for request in rows.request.tolist()]
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

    def _answers(self, conversations: list[list[int]]) -> list[str]:
        order = sorted(range(len(conversations)), key=lambda i: len(conversations[i]))
        size, answers = self._batch_size, [""] * len(order)
        for start in tqdm(range(0, len(order), size), desc=self.name, unit="batch", disable=None):
            batch = order[start : start + size]
            asked = self._tokenizer.pad(
                {"input_ids": [conversations[i] for i in batch]}, return_tensors="pt"
            ).to(self._model.device)
            with torch.inference_mode():
                answered = self._model.generate(
                    **asked,
                    max_new_tokens=_ANSWER_TOKENS,
                    do_sample=False,
                    pad_token_id=self._tokenizer.pad_token_id,
                )
            new = answered[:, asked["input_ids"].shape[1] :]
            for i, text in zip(
                batch, self._tokenizer.batch_decode(new, skip_special_tokens=True), strict=True
            ):
                answers[i] = text
        return answers
