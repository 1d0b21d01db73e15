"""Prompts as vectors: averages of the serving model's own token embeddings, made small."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_collection.atomic_file import replace_file, write_text_atomically
from data_collection.models import EMBEDDED_MODELS, resolve_model
from data_collection.text_file import read_text

__all__ = ["PromptEmbedding", "PromptEmbeddingError"]

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
