"""Fine-tuning an auxiliary model to read a request's text and say what remains of it."""

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from tqdm import tqdm

from predictor.evaluation.comparators.comparator import fitted, row_token_ids, serving_model_folder
from predictor.training.row_table import RowTable

__all__ = ["FineTuning", "TextNetwork", "TextRegressor"]

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
    """An auxiliary model with a linear head; subclasses say which state the head reads.

    ``forward`` takes ``input_ids`` and ``attention_mask``, [batch, length], and returns the
    remaining length over the scale, [batch].

    Args:
        backbone: a Hugging Face model without a head.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)


class TextRegressor:
    r"""An auxiliary model f with a linear head, trained on L1 as in STAR §4.4.

    .. math:: \min_\theta \frac{1}{N} \sum_i | f_\theta(x_i) - y_i / s |, \qquad
        \hat y = \max(0, s\, f_\theta(x))

    :math:`x_i` is the text of row i, the prompt and what was generated so far, in the auxiliary
    model's tokens. It is cut after ``max_tokens``, so that the beginning stays and the newest
    text is lost: the reason the paper gives (§4.3) for the error on long requests. The scale
    s, the mean remaining tokens of the training rows, only conditions the optimisation.

    Args:
        name: of the comparator.
        network: of its weights, those that require a gradient are trained.
        tokenizer: of the auxiliary model.
        serving_model: ``smollm2``, a Hugging Face id or a folder; the model that was served,
            for the text of recorded token ids.
        max_tokens: tokens of the text that are read.
        fine_tuning: how to train.

    Attributes:
        training_seconds: wall time of the last ``fit``.
        training_loss: mean absolute error in tokens during each pass of the last ``fit``.
        validation_mae: mean absolute error in tokens after each pass.
    """

    def __init__(
        self,
        name: str,
        network: TextNetwork,
        tokenizer: Any,
        serving_model: str,
        max_tokens: int,
        fine_tuning: FineTuning,
    ) -> None:
        self.name = name
        self.training_seconds = 0.0
        self.training_loss: list[float] = []
        self.validation_mae: list[float] = []
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network: TextNetwork = network.to(self._device)
        self._tokenizer = tokenizer
        self._serving_model = serving_model
        self._max_tokens = max_tokens
        self._fine_tuning = fine_tuning
        self._scale: float | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the auxiliary model and its head, frozen ones included."""
        return sum(weight.numel() for weight in self._network.parameters())

    @property
    def notes(self) -> list[str]:
        """On how much it trained, and how much text it reads."""
        settings = self._fine_tuning
        return [
            f"{self.name}: fine-tuned on at most {settings.max_rows} training rows for "
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
        settings = self._fine_tuning
        order = np.random.default_rng(settings.seed)
        train = self._subsample("training", train, settings.max_rows, order)
        validation = self._subsample("validation", validation, settings.max_validation_rows, order)
        inputs, validation_inputs = self._inputs(train), self._inputs(validation)
        target = train.remaining_tokens.astype(np.float32)
        self._scale = max(1.0, float(target.mean()))
        self._start_at_median(float(np.median(target)) / self._scale)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(settings.seed)
            self._descend(inputs, target, validation_inputs, validation, order, started)
        self.training_seconds = time.monotonic() - started

    def predict(self, rows: RowTable) -> npt.NDArray[np.float32]:
        """Return predicted remaining tokens, [n_rows].

        Rows that are alike after truncation are computed once.

        Raises:
            RuntimeError: ``fit`` was not called.
            ValueError: token ids were not recorded, or the rows are of another model.
        """
        fitted(self._scale, self.name)
        return self._predict(self._inputs(rows), progress=True)

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

    def _start_at_median(self, median: float) -> None:
        nn.init.zeros_(self._network.head.weight)
        nn.init.constant_(self._network.head.bias, median)

    def _forward(self, inputs: list[list[int]]) -> torch.Tensor:
        batch = self._tokenizer.pad({"input_ids": inputs}, return_tensors="pt").to(self._device)
        output: torch.Tensor = self._network(batch["input_ids"], batch["attention_mask"])
        return output

    def _descend(
        self,
        inputs: list[list[int]],
        target: npt.NDArray[np.float32],
        validation_inputs: list[list[int]],
        validation: RowTable,
        order: np.random.Generator,
        started: float,
    ) -> None:
        settings, scale = self._fine_tuning, fitted(self._scale, self.name)
        weights = {n: w for n, w in self._network.named_parameters() if w.requires_grad}
        optimizer = torch.optim.AdamW(weights.values(), lr=settings.learning_rate)
        scaled = torch.from_numpy(target / scale).to(self._device)
        deadline = started + 60 * settings.max_minutes
        best: dict[str, torch.Tensor] = {}
        best_epoch = 0
        self.training_loss, self.validation_mae = [], []
        for epoch in range(settings.max_epochs):
            self._network.train()
            errors: list[float] = []
            batches = np.array_split(
                order.permutation(len(inputs)), -(-len(inputs) // settings.batch_size)
            )
            for batch in tqdm(batches, desc=f"{self.name} epoch {epoch}", disable=None):
                output = self._forward([inputs[i] for i in batch])
                loss = nn.functional.l1_loss(output, scaled[torch.from_numpy(batch)])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                errors.append(loss.item() * scale)
                if time.monotonic() > deadline:
                    break
            self.training_loss.append(float(np.mean(errors)))
            predicted = self._predict(validation_inputs)
            mae = float(np.abs(predicted - validation.remaining_tokens).mean())
            self.validation_mae.append(mae)
            logger.info("%s: epoch %d, validation MAE %.1f tokens", self.name, epoch, mae)
            if mae <= min(self.validation_mae):
                best = {n: w.detach().clone() for n, w in weights.items()}
                best_epoch = epoch
            if epoch - best_epoch >= settings.patience or time.monotonic() > deadline:
                break
        self._network.load_state_dict(best, strict=False)

    @torch.inference_mode()
    def _predict(self, inputs: list[list[int]], progress: bool = False) -> npt.NDArray[np.float32]:
        self._network.eval()
        distinct = sorted({tuple(ids) for ids in inputs}, key=len)
        place = {ids: i for i, ids in enumerate(distinct)}
        outputs = np.empty(len(distinct), dtype=np.float32)
        size = self._fine_tuning.batch_size
        for start in tqdm(
            range(0, len(distinct), size), desc=self.name, disable=None if progress else True
        ):
            batch = [list(ids) for ids in distinct[start : start + size]]
            outputs[start : start + size] = self._forward(batch).cpu().numpy()
        tokens = np.maximum(outputs * np.float32(fitted(self._scale, self.name)), 0)
        row = np.array([place[tuple(ids)] for ids in inputs], dtype=np.int64)
        predicted: npt.NDArray[np.float32] = tokens[row]
        return predicted
