"""Forecasts of requests from their prompts: a survival model on a prompt's vector."""

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from data_collection.files import find_shipped, read_text, replace_file, write_text_atomically
from data_collection.models import EMBEDDED_MODELS, resolve_model
from predictor.forecasts.forecast import SurvivalForecast
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import (
    NO_REPETITION,
    PROMPT_LAYER,
    CheckpointError,
    RequestRows,
)
from predictor.models.survival_mlp import SurvivalMLP

FloatArray = npt.NDArray[np.float32]

_TABLE, _TOKENIZER, _SETTINGS = "embedding.safetensors", "tokenizer.json", "embedding.json"
_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_ENDS, _MOST, _LONGEST_WORD = 16, 512, 6
_AT_ONCE = 8_192


class PromptEmbeddingError(ValueError):
    """A prompt embedding cannot be made or read; the message names the file or the model."""


class PromptEmbedding:
    r"""The vector of a prompt: what its first tokens, its last tokens and all of them are like.

    .. math:: v = \Big[\frac1n \sum_{i} t_i,\; \frac1m \sum_{i \le m} t_i,\;
        \frac1m \sum_{i > n - m} t_i\Big], \qquad m = \min(n, 16)

    with t the input embeddings of the serving model, projected on their principal components among
    the tokens that prompts have. Special tokens, and what a chat template puts before and after
    every prompt, do not count. Of a long prompt its first and last 512 tokens are read.

    Args:
        table: [vocabulary, e] a vector for each token; each column is scaled to fit a byte.
        tokenizer: the serving model's, of the `tokenizers` library.
        before: tokens that the template puts before every prompt.
        after: tokens that it puts after every prompt.
    """

    def __init__(
        self,
        table: npt.NDArray[np.int8],
        tokenizer: Any,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        self._table, self._tokenizer = table, tokenizer
        self._before, self._after = tuple(before), tuple(after)

    @classmethod
    def fit(
        cls,
        model: str,
        prompts: Sequence[Sequence[int]],
        dimension: int = 128,
        revision: str | None = None,
    ) -> "PromptEmbedding":
        """Return the embedding of a serving model's prompts.

        Args:
            model: Hugging Face id, folder, or embedded model.
            prompts: token ids, to learn the template and the principal components from.
            dimension: e, of a token's vector.
            revision: of a model of the hub.

        Raises:
            PromptEmbeddingError: there are no prompts, or the model's files lack what is needed.
        """
        if not prompts:
            raise PromptEmbeddingError("there are no prompts to learn from")
        folder = _model_folder(model, revision)
        tokenizer, vectors = _read_tokenizer(folder), _token_vectors(folder)
        largest = max((max(prompt, default=0) for prompt in prompts), default=0)
        if largest >= len(vectors):
            raise PromptEmbeddingError(
                f"{model} has {len(vectors)} tokens, the prompts have token {largest}: they are "
                "another model's"
            )
        before = _shared_start(prompts)
        after = _shared_start([prompt[len(before) :][::-1] for prompt in prompts])[::-1]
        unprojected = cls(np.empty((0, 0), np.int8), tokenizer, before, after)
        counts = np.ones(len(vectors))
        for prompt in prompts:
            np.add.at(counts, unprojected.own_tokens(prompt)[0], 1.0)
        table = _principal(vectors, counts, min(dimension, vectors.shape[1]))
        return cls(table, tokenizer, before, after)

    @property
    def size(self) -> int:
        """Values of a prompt's vector, 3e."""
        return 3 * int(self._table.shape[1])

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def own_tokens(self, prompt: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
        """Return the tokens of a prompt that count, and about how many the whole prompt has.

        Those of the template and special ones do not count; of a long prompt both ends do.
        """
        begin, end, n = 0, len(prompt), len(self._before)
        if n and tuple(prompt[:n]) == self._before:
            begin = n
        n = len(self._after)
        if n and end - n >= begin and tuple(prompt[end - n :]) == self._after:
            end -= n
        if end - begin <= 2 * _MOST:
            own = self._counted(prompt[begin:end])
            return own, len(own)
        ends = [*prompt[begin : begin + _MOST], *prompt[end - _MOST : end]]
        return self._counted(ends), end - begin

    def read(self, text: str) -> tuple[npt.NDArray[np.int64], int]:
        """Return the tokens of a text that count, and about how many the whole text has.

        A long text is cut by its bytes before it is tokenized: in Chinese, or with emoji, each
        character may be several tokens.
        """
        raw, most = text.encode(errors="ignore"), _MOST * _LONGEST_WORD
        if len(raw) <= 2 * most:
            own = self._encoded(text)
            return own, len(own)
        ends = (part.decode(errors="ignore") for part in (raw[:most], raw[-most:]))
        own = np.concatenate([self._encoded(end) for end in ends])
        return own, len(own) * len(raw) // (2 * most)

    def _encoded(self, text: str) -> npt.NDArray[np.int64]:
        # Unlike `encode`, a batch leaves Python's lock to other threads meanwhile.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return self._counted(encoded.ids)

    def _counted(self, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array([one for one in tokens if one not in self._special], dtype=np.int64)

    def vector(self, own: npt.NDArray[np.int64]) -> FloatArray:
        """Return the vector [3e] of what `own_tokens` or `read` gives; unknown tokens have none."""
        own = own[(own >= 0) & (own < len(self._table))]
        if len(own) == 0:
            return np.zeros(self.size, dtype=np.float32)
        tokens = self._table[own].astype(np.float32)
        return np.concatenate(
            [tokens.mean(axis=0), tokens[:_ENDS].mean(axis=0), tokens[-_ENDS:].mean(axis=0)]
        )

    def save(self, folder: Path) -> None:
        """Write the embedding beside a checkpoint's weights."""
        from safetensors.numpy import save_file

        write_text_atomically(folder / _TOKENIZER, self._tokenizer.to_str())
        settings = {"before": list(self._before), "after": list(self._after)}
        write_text_atomically(folder / _SETTINGS, json.dumps(settings) + "\n")
        with replace_file(folder / _TABLE) as temporary:
            save_file({"tokens": self._table}, temporary)

    @classmethod
    def load(cls, folder: Path) -> "PromptEmbedding":
        """Read the embedding of a checkpoint.

        Raises:
            PromptEmbeddingError: a file is missing or damaged.
        """
        from safetensors.numpy import load_file

        for name in (_TABLE, _TOKENIZER, _SETTINGS):
            if not (folder / name).is_file():
                raise PromptEmbeddingError(
                    f"{folder}: no {name}, so this checkpoint reads no prompts; train one with "
                    "`headway train fit --config configs/predictor/prompt.yaml`"
                )
        try:
            table = load_file(folder / _TABLE)["tokens"]
            settings = json.loads(read_text(folder / _SETTINGS))
            before, after = settings["before"], settings["after"]
            if table.ndim != 2 or table.size == 0 or table.dtype != np.int8:
                raise ValueError("no table of bytes")
            if not all(type(token) is int for token in [*before, *after]):
                raise ValueError("a template is token ids")
        except Exception as error:  # safetensors raises its own
            raise PromptEmbeddingError(
                f"{folder}: a damaged prompt embedding ({type(error).__name__}: {error})"
            ) from error
        return cls(table, _read_tokenizer(folder), before, after)


def _model_folder(model: str, revision: str | None) -> Path:
    by_name = {one.name: short for short, one in EMBEDDED_MODELS.items()}
    found = resolve_model(by_name.get(model, model))
    if Path(found).is_dir():
        return Path(found)
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors"]
        return Path(snapshot_download(found, revision=revision, allow_patterns=files))
    except Exception as error:  # the hub raises its own
        raise PromptEmbeddingError(
            f"{model}: neither a folder nor a readable model of the hub: {error}"
        ) from error


def _read_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception as error:  # it raises a bare Exception
        raise PromptEmbeddingError(f"{folder / _TOKENIZER}: {error}") from error


def _token_vectors(folder: Path) -> FloatArray:
    """Return the input embeddings of a model, [vocabulary, d]."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                if name.endswith(_NAMES):
                    found: FloatArray = weights.get_tensor(name).float().numpy()
                    return found
    raise PromptEmbeddingError(f"{folder}: no *.safetensors file with {' or '.join(_NAMES)}")


def _principal(
    vectors: FloatArray, counts: npt.NDArray[Any], dimension: int
) -> npt.NDArray[np.int8]:
    """Return each vector's principal components, weighted by how often its token occurs."""
    weights = counts / counts.sum()
    mean = weights @ vectors
    covariance = np.zeros((vectors.shape[1],) * 2)
    for start in range(0, len(vectors), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        centred = vectors[part] - mean
        covariance += (centred * weights[part, None]).T @ centred
    _, directions = np.linalg.eigh(covariance)
    kept = directions[:, ::-1][:, :dimension]
    signs = np.where(kept[np.abs(kept).argmax(axis=0), np.arange(dimension)] < 0, -1.0, 1.0)
    components = (vectors - mean) @ (kept * signs)
    largest = np.maximum(np.abs(components).max(axis=0), 1e-12)
    scaled: npt.NDArray[np.int8] = np.rint(components * (127 / largest)).astype(np.int8)
    return scaled


def _shared_start(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the tokens that all prompts begin with, if there are several prompts."""
    ordered = sorted(map(list, prompts))
    first, last = ordered[0], ordered[-1]
    if first == last:
        return ()
    n = 0
    while n < min(len(first), len(last)) and first[n] == last[n]:
        n += 1
    return tuple(first[:n])


class PromptPredictor:
    """Forecasts how many tokens a request will generate, before anything of it is computed.

    Args:
        model: a `SurvivalMLP` on the vectors of prompts.
        embedding: that makes them.

    Attributes:
        longest: answer that it was trained on, in tokens.
    """

    def __init__(self, model: SurvivalMLP, embedding: PromptEmbedding) -> None:
        self.model, self._embedding = model, embedding
        self.longest = int(model.config()["trained_remaining_tokens"][1])

    @classmethod
    def load(cls, checkpoint: str) -> "PromptPredictor":
        """Load a checkpoint that ``headway train fit --data.reads prompts`` wrote.

        Raises:
            CheckpointError: the folder is no checkpoint, is damaged, or reads hidden states.
        """
        model = load_predictor(checkpoint)
        if not isinstance(model, SurvivalMLP) or model.layer != PROMPT_LAYER:
            raise CheckpointError(
                f"{checkpoint}: forecasts from hidden states, not from prompts; train one with "
                "`headway train fit --config configs/predictor/prompt.yaml`"
            )
        if int(model.config()["trained_remaining_tokens"][1]) < 1:
            raise CheckpointError(
                f"{checkpoint}: config.json says trained_remaining_tokens "
                f"{list(model.config()['trained_remaining_tokens'])}: it has learned from no answer"
            )
        try:
            embedding = PromptEmbedding.load(Path(find_shipped(checkpoint)))
        except PromptEmbeddingError as error:
            raise CheckpointError(str(error)) from error
        if embedding.size != model.hidden_size:
            raise CheckpointError(
                f"{checkpoint}: its model reads {model.hidden_size} values, its embedding has "
                f"{embedding.size}"
            )
        return cls(model, embedding)

    def forecast(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: npt.ArrayLike,
        max_tokens: npt.ArrayLike,
    ) -> SurvivalForecast:
        """Forecast n requests by their prompts' token ids.

        Args:
            prompts: as the engine gets them, with the chat template.
            temperature: [n] nan where unknown.
            max_tokens: [n] output tokens at most.
        """
        own = [self._embedding.own_tokens(prompt) for prompt in prompts]
        vectors = np.stack([self._embedding.vector(tokens) for tokens, _ in own])
        lengths = np.array([length for _, length in own])
        return self._forecast(vectors, lengths, temperature, max_tokens)

    def expected_tokens(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, temperature: float = nan
    ) -> float:
        """Return the mean number of tokens that one answer is forecast to have.

        Args:
            prompt: text without a chat template, or token ids.
            max_tokens: output tokens at most. No answer is expected to be longer than the longest
                that was trained on, whatever its client allows.
            temperature: nan where unknown.
        """
        if isinstance(prompt, str):
            own, length = self._embedding.read(prompt)
        else:
            own, length = self._embedding.own_tokens(prompt)
        vector = self._embedding.vector(own)[None]
        most = self.longest if max_tokens is None else min(max(max_tokens, 1), self.longest)
        return float(self._forecast(vector, np.array([length]), [temperature], [most]).mean()[0])

    def warn_of_other_model(self, served: str, logger: logging.Logger) -> None:
        """Warn if another model is served than the one whose answers it was trained on."""
        trained = self.model.serving_model
        if served != trained:
            logger.warning(
                "prompt_checkpoint was trained on answers of %s, but %s is served", trained, served
            )

    def _forecast(
        self,
        vectors: npt.NDArray[np.float32],
        lengths: npt.NDArray[np.int64],
        temperature: npt.ArrayLike,
        max_tokens: npt.ArrayLike,
    ) -> SurvivalForecast:
        numbers = prompt_numbers(lengths, np.asarray(max_tokens), np.asarray(temperature))
        rows = RequestRows(torch.from_numpy(vectors), torch.from_numpy(numbers))
        return self.model.forecast(rows)


def prompt_numbers(
    lengths: npt.NDArray[np.int64],
    max_tokens: npt.NDArray[np.generic],
    temperature: npt.NDArray[np.generic],
) -> npt.NDArray[np.float32]:
    """Return the columns of `INPUTS` for requests that have no token yet, [n, 6]."""
    numbers = np.zeros((len(lengths), 6), dtype=np.float32)
    numbers[:, 1], numbers[:, 2], numbers[:, 3] = lengths, max_tokens, temperature
    numbers[:, 4:] = NO_REPETITION
    return numbers
