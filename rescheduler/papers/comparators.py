"""What STAR's predictor is measured against (Table 1): models that read text, and self-reports."""

import logging
import re
import time
from collections.abc import Callable
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
    FineTunedModule,
    LabelledTexts,
    TextBatch,
    fine_tune,
    mean_state,
    minilm_folder,
    shuffled_text_batches,
    text_batches,
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


class TextNetwork(nn.Module):
    """A Hugging Face model with a linear head on a state of the text, [batch, d].

    Args:
        backbone: the model.
        state: what the head reads, of the model, ``input_ids`` and ``attention_mask``: `mean_state`
            or `last_state`.
    """

    def __init__(self, backbone: Any, state: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        self._state = state

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the remaining length over the scale, [batch], of texts [batch, length]."""
        state = self._state(self.backbone, input_ids, attention_mask)
        remaining: torch.Tensor = self.head(state).squeeze(-1)
        return remaining


def last_state(
    backbone: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Return the state of each text's last token, [batch, d]; padding is on the right."""
    found = backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    states: torch.Tensor = found.last_hidden_state
    return states[torch.arange(len(states), device=states.device), attention_mask.sum(1) - 1]


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
        tokenizer: of the auxiliary model.
        serving_model: ``smollm2``, a Hugging Face id or a folder; the model that was served,
            for the text of recorded token ids.
        max_tokens: tokens of the text that are read.
        settings: how to train.

    Attributes:
        training_seconds: wall time of the last ``fit``.
        training_loss: mean absolute error in tokens during each pass of the last ``fit``.
        validation_mae: mean absolute error in tokens after each pass.
    """

    name: str

    def __init__(
        self,
        network: TextNetwork,
        tokenizer: Any,
        serving_model: str,
        max_tokens: int,
        settings: FineTuning,
    ) -> None:
        self.training_seconds = 0.0
        self.training_loss: list[float] = []
        self.validation_mae: list[float] = []
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network: TextNetwork = network.to(self._device)
        self._tokenizer, self._serving_model = tokenizer, serving_model
        self._max_tokens, self._settings = max_tokens, settings
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
        settings = self._settings
        order = np.random.default_rng(settings.seed)
        train = self._subsample("training", train, settings.max_rows, order)
        validation = self._subsample("validation", validation, settings.max_validation_rows, order)
        train_texts, validation_texts = (
            LabelledTexts(self._inputs(rows), rows.remaining_tokens.astype(np.float32))
            for rows in (train, validation)
        )
        target, head = train_texts.labels, self._network.head
        self._scale = max(1.0, float(target.mean()))
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, float(np.median(target)) / self._scale)
        training = _RegressorTraining(self._network, self._scale, settings.learning_rate)
        size, padding = settings.batch_size, self._tokenizer.pad_token_id
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(settings.seed)
            fine_tune(
                training,
                shuffled_text_batches(train_texts, size, padding, order),
                text_batches(validation_texts, size, padding, generator=torch.Generator()),
                max_epochs=settings.max_epochs,
                patience=settings.patience,
                max_seconds=60 * settings.max_minutes - (time.monotonic() - started),
            )
        self._network.to(self._device)  # Lightning leaves it on the CPU
        self.training_loss = training.history["train_mae"]
        self.validation_mae = training.history[training.monitor]
        self.training_seconds = time.monotonic() - started

    @torch.inference_mode()
    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return predicted remaining tokens, [n_rows].

        Raises:
            RuntimeError: ``fit`` was not called.
            ValueError: token ids were not recorded, or the rows are of another model.
        """
        scale = fitted(self._scale, self.name)
        inputs = self._inputs(rows)
        self._network.eval()
        distinct = sorted({tuple(ids) for ids in inputs}, key=len)  # rows alike once truncated
        place = {ids: i for i, ids in enumerate(distinct)}
        outputs = np.empty(len(distinct), dtype=np.float32)
        texts = LabelledTexts(distinct, np.arange(len(distinct)))
        batches = text_batches(texts, self._settings.batch_size, self._tokenizer.pad_token_id)
        for batch in tqdm(batches, desc=self.name, disable=None):
            read = batch.input_ids.to(self._device), batch.attention_mask.to(self._device)
            outputs[batch.labels.numpy()] = self._network(*read).cpu().numpy()
        tokens: npt.NDArray[np.float32] = np.maximum(outputs * np.float32(scale), 0)
        return tokens[np.array([place[tuple(ids)] for ids in inputs], dtype=np.int64)]

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
        encoded = self._tokenizer(texts, truncation=True, max_length=self._max_tokens)
        return list(encoded["input_ids"])


class _RegressorTraining(FineTunedModule):
    """Minimise the mean absolute error of the scaled remaining length."""

    monitor = "val_mae"

    def __init__(self, network: TextNetwork, scale: float, learning_rate: float) -> None:
        super().__init__()
        self.network = network
        self._scale = scale
        self._learning_rate = learning_rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learning = [weights for weights in self.network.parameters() if weights.requires_grad]
        return torch.optim.AdamW(learning, lr=self._learning_rate)

    def training_step(self, batch: TextBatch, batch_index: int) -> torch.Tensor:
        output = self.network(batch.input_ids, batch.attention_mask)
        loss = nn.functional.l1_loss(output, batch.labels / self._scale)
        mae = loss.detach() * self._scale
        self.log("train_mae", mae, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: TextBatch, batch_index: int) -> None:
        output = self.network(batch.input_ids, batch.attention_mask)
        errors = (self._scale * output).clamp(min=0) - batch.labels
        self.log(self.monitor, errors.abs().mean(), batch_size=len(errors))


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
        from transformers import AutoModel, AutoTokenizer

        folder = str(minilm_folder()) if model == "minilm" else resolve_model(model)
        backbone: Any = AutoModel.from_pretrained(folder)
        positions = backbone.config.max_position_embeddings
        if max_tokens > positions:
            raise ValueError(f"{model} reads {positions} tokens, max_tokens is {max_tokens}")
        super().__init__(
            TextNetwork(backbone, mean_state),
            AutoTokenizer.from_pretrained(folder),
            serving_model,
            max_tokens,
            FineTuning(**_ENCODER | fine_tuning),
        )


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
        from transformers import AutoModel, AutoTokenizer

        folder = resolve_model(model)
        backbone: Any = AutoModel.from_pretrained(folder)
        limit = min(_PAPER_LIMIT, backbone.config.max_position_embeddings)
        if max_tokens > limit:
            raise ValueError(f"{model} reads {limit} tokens here, max_tokens is {max_tokens}")
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        tokenizer.padding_side = "right"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        network = TextNetwork(backbone, last_state)
        train_last_layers(backbone, train_layers)
        super().__init__(
            network,
            tokenizer,
            serving_model,
            max_tokens,
            FineTuning(**_CAUSAL_LM | fine_tuning),
        )


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
