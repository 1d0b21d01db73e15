"""Which of a model's states say most of a length: other layers, means, the prompt's words.

    python -m benchmarks.state_inputs [--states FOLDER] [--arms NAME ...] [--seeds 2]
        [--answers N] [--quick] [--json OUT]

SmolLM2 reads the answers of all three rounds again, up to 160 tokens of each, and the held-out
ones. Its states are kept in the folder, some gigabytes (half an hour on two cores), and read from
there the next time. Then the product's survival network is trained for each arm, on the same rows
and with the same settings (``headway train``), with further vectors beside the one that it reads:

- ``newest``: the newest token's state in the last layer, and nothing beside it;
- ``layer 10`` to ``layer 25``: the same token's state after so many of the 30 layers;
- ``answer``, ``answer 20``: the mean over the answer's tokens, of the last layer or of the 20th;
- ``averaged``, ``averaged 20``: these alone, where a token counts half after 30 more. Within blocks
  of 20 tokens all count alike, and the prompt's last one does not: nearly what ``headway collect
  --record.layer 20 --record.state_half_life 30`` records of the latter;
- ``prompt``, ``prompt 20``: the same over the prompt; ``prompt end``: its last token's state;
  ``prompt entropy``: the mean weighted by the entropy of each next token (EGTP);
- ``words``: the prompt's embedding, which a proxy knows before prefill.

*Integrated Brier scores* are of P(R > h), over h up to the cap, on prompts that nothing has
learned from; ``gain`` is how much less an arm has than ``newest``, in percent, with half a 95%
interval of a bootstrap over answers. Several seeds are scored each, and their errors averaged.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from tqdm import tqdm

from benchmarks.support.report import arguments, report
from data_collection.dataset.dataset_schema import Session
from data_collection.files import find_shipped, replace_file
from data_collection.models import resolve_model
from data_collection.workload.prompts import Transcript, load_transcripts
from predictor.models.survival_mlp import SurvivalMLP
from predictor.prompts.prompt_predictor import PromptEmbedding
from predictor.training.predictor_training import SurvivalTraining
from predictor.training.row_table import HiddenStates, Requests, RowTable
from predictor.training.rows_data_module import RowsDataModule, request_rows

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
States = npt.NDArray[np.float16]
"""[n_rows, n_kinds, d]: a row for each age that an answer reaches."""

FOLDER = "transcripts/smollm2-135m-instruct"
LEARNED_FROM, HELD_OUT = ("round-1", "round-2", "round-3"), "held-out"
AGES = (0, 20, 40, 60, 80, 100, 120, 160)
SCORED = (0, 80, 160)
LAYERS = (10, 15, 20, 25)
MIDDLE = 20
KINDS = (
    "newest",
    *(f"layer {layer}" for layer in LAYERS),
    *("answer", f"answer {MIDDLE}", "prompt", f"prompt {MIDDLE}", "prompt end", "prompt entropy"),
)
"""What is kept of each row, [n_kinds, d]."""
WORDS = "words"
AVERAGED = {"averaged": "answer", f"averaged {MIDDLE}": f"answer {MIDDLE}"}
"""Averages with a half-life, and the means that they are made of."""
HALF_LIFE = 30.0
ARMS: dict[str, tuple[str, ...]] = {
    "newest": ("newest",),
    **{f"layer {layer}": ("newest", f"layer {layer}") for layer in LAYERS},
    "answer": ("newest", "answer"),
    f"answer {MIDDLE}": ("newest", f"answer {MIDDLE}"),
    "prompt": ("newest", "prompt"),
    f"prompt {MIDDLE}": ("newest", f"prompt {MIDDLE}"),
    "prompt end": ("newest", "prompt end"),
    "prompt entropy": ("newest", "prompt entropy"),
    "words": ("newest", WORDS),
    **{averaged: (averaged,) for averaged in AVERAGED},
    "all": ("newest", f"layer {MIDDLE}", f"answer {MIDDLE}", WORDS),
}
TOKENS_AT_ONCE, ANSWERS_AT_ONCE = 2_048, 256
STEP, RESAMPLES, VALIDATION = 8, 1000, 0.15
SESSION = Session(
    name="states",
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    revision="",
    hidden_size=576,
    dtype="float16",
    k=1,
    engine="transformers",
    runner="transformers",
    headway="",
    model_dtype="bfloat16",
    started="",
)


def main() -> None:
    parser = arguments("which of a model's states say most of a length")
    folder = Path("runs/states")
    parser.add_argument("--states", type=Path, default=folder, help=f"kept here ({folder})")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=2, help="networks of each arm (2)")
    parser.add_argument("--answers", type=int, help="only so many of each file")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    most = 96 if options.quick and options.answers is None else options.answers
    read = {name: _read(name, most, options.states) for name in (*LEARNED_FROM, HELD_OUT)}
    learned = [one for name in LEARNED_FROM for one in read[name][0]]
    embedding = PromptEmbedding.fit(resolve_model("smollm2"), [_prompt(one) for one in learned])
    rows = _rows([read[name] for name in LEARNED_FROM], embedding)
    held_out = _rows([read[HELD_OUT]], embedding)
    errors = {
        arm: np.mean(
            [
                _errors(_trained(rows, ARMS[arm], seed), held_out.of(ARMS[arm]))
                for seed in range(1 if options.quick else options.seeds)
            ],
            axis=0,
        )
        for arm in tqdm(dict.fromkeys(["newest", *options.arms]), desc="arms")
    }
    report("state_inputs", _figures(errors, held_out.table), options.json)


def _read(name: str, most: int | None, kept: Path) -> tuple[list[Transcript], States]:
    """Return answers of a file, some from all of it, and the states of their rows."""
    found = load_transcripts(find_shipped(f"{FOLDER}/{name}.parquet")).transcripts
    found = [one for one in found if one.answer]
    chosen = np.linspace(0, len(found) - 1, min(most or len(found), len(found))).astype(int)
    answers, parts = [found[i] for i in chosen.tolist()], []
    of = sha256(repr((AGES, KINDS, name, len(answers))).encode()).hexdigest()[:8]
    for begin in tqdm(range(0, len(answers), ANSWERS_AT_ONCE), desc=name):
        file = kept / f"{name}-{of}-{begin:06}.npy"
        if not file.is_file():
            kept.mkdir(parents=True, exist_ok=True)
            with replace_file(file) as temporary, temporary.open("wb") as out:
                np.save(out, _model().states(answers[begin : begin + ANSWERS_AT_ONCE]))
        parts.append(np.load(file))
    return answers, np.concatenate(parts)


def _ages(answer: Transcript) -> list[int]:
    return [age for age in AGES if age < len(answer.answer)]


def _prompt(answer: Transcript) -> list[int]:
    return [token for token in answer.prompt if isinstance(token, int)]


class _Model:
    """SmolLM2 in bfloat16, which reads prompts with their answers."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        folder = resolve_model("smollm2")
        # It is loaded to predict, without dropout.
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._weighted: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def states(self, answers: Sequence[Transcript]) -> States:
        """Return what `KINDS` names of each row, [n_rows, n_kinds, d]."""
        texts = [[*_prompt(one), *one.answer[: AGES[-1]]] for one in answers]
        found: dict[int, States] = {}
        for batch in _batches([len(text) for text in texts]):
            longest = max(len(texts[i]) for i in batch)
            # What comes after a token changes nothing before it: padding needs no mask.
            tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, i in enumerate(batch):
                tokens[row, : len(texts[i])] = torch.tensor(texts[i])
            layers = self._model.model(tokens, output_hidden_states=True).hidden_states
            for row, i in enumerate(batch):
                own = {layer: layers[layer][row].float() for layer in (*LAYERS, -1)}
                found[i] = self._rows(answers[i], own)
        return np.concatenate([found[i] for i in range(len(answers))])

    def _rows(self, answer: Transcript, own: dict[int, torch.Tensor]) -> States:
        prompt, ages = _prompt(answer), _ages(answer)
        n = len(prompt)
        last, middle = own[-1], own[MIDDLE]
        shared = [last[:n].mean(0), middle[:n].mean(0), last[n - 1], self._by_entropy(prompt, last)]
        rows = [
            torch.stack(
                [
                    last[n + age - 1],
                    *(own[layer][n + age - 1] for layer in LAYERS),
                    *(one[min(n, n + age - 1) : n + age].mean(0) for one in (last, middle)),
                    *shared,
                ]
            )
            for age in ages
        ]
        return torch.stack(rows).half().numpy()

    def _by_entropy(self, prompt: list[int], last: torch.Tensor) -> torch.Tensor:
        """Return the mean state of a prompt, weighted by the entropy of each next token."""
        key = tuple(prompt)
        if key not in self._weighted:
            states = last[: len(prompt)]
            entropy = torch.cat([self._entropy(part) for part in torch.split(states, 512)])
            self._weighted[key] = entropy.softmax(0) @ states
        return self._weighted[key]

    def _entropy(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(states.bfloat16()).float()
        chances = logits.softmax(-1)
        return logits.logsumexp(-1) - (chances * logits).sum(-1)


@cache
def _model() -> _Model:
    return _Model()


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield which texts are read at once: those that are about as long."""
    batch: list[int] = []
    for i in np.argsort(lengths, kind="stable").tolist():
        if batch and (len(batch) + 1) * lengths[i] > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(i)
    yield batch


class _Rows(NamedTuple):
    """Rows of some answers, with all that arms may read of them.

    ``words`` are their prompts' embeddings [n_answers, 3e].
    """

    table: RowTable
    states: States
    words: npt.NDArray[np.float32]

    def of(self, kinds: Sequence[str]) -> RowTable:
        """Return the table with the vectors of an arm."""
        parts = [self._vectors(kind) for kind in kinds]
        vectors = np.concatenate(parts, axis=1)
        session = dataclasses.replace(self.table.session, hidden_size=vectors.shape[1])
        states = HiddenStates([vectors])
        return dataclasses.replace(self.table, hidden_states=states, session=session)

    def _vectors(self, kind: str) -> npt.NDArray[Any]:
        if kind == WORDS:
            return self.words[self.table.request]
        if kind in AVERAGED:
            return self._averaged(self.states[:, KINDS.index(AVERAGED[kind])])
        return self.states[:, KINDS.index(kind)]

    def _averaged(self, means: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
        """Return averages with a half-life, from the means over all tokens at each age."""
        ages, of = self.table.generated_tokens.tolist(), means.astype(np.float32)
        found, weight, decay = of.copy(), 0.0, 2 ** (-1 / HALF_LIFE)
        for i, age in enumerate(ages):
            before = ages[i - 1] if age else 0
            if before == 0:
                weight = (1 - decay**age) / (1 - decay)
                continue
            tokens = age - before
            block = (age * of[i] - before * of[i - 1]) / tokens
            earlier, new = weight * decay**tokens, (1 - decay**tokens) / (1 - decay)
            weight = earlier + new
            found[i] = (earlier * found[i - 1] + new * block) / weight
        return found.astype(np.float16)


def _rows(read: Sequence[tuple[list[Transcript], States]], embedding: PromptEmbedding) -> _Rows:
    answers = [one for some, _ in read for one in some]
    states = np.concatenate([some for _, some in read])
    prompts = [_prompt(one) for one in answers]
    numbers: dict[tuple[int, ...], int] = {}
    group = np.array([numbers.setdefault(tuple(one), len(numbers)) for one in prompts])
    lengths = np.array([len(one.answer) for one in answers])
    cut = np.array([one.finish_reason != "stop" for one in answers])
    temperature = np.array([1.0 if one.temperature is None else one.temperature for one in answers])
    caps = np.array([one.max_tokens for one in answers])
    request = np.repeat(np.arange(len(answers)), [len(_ages(one)) for one in answers])
    age = np.concatenate([_ages(one) for one in answers])
    table = RowTable(
        hidden_states=HiddenStates([states[:, 0]]),
        vector=np.arange(len(request)),
        request=request,
        prompt_tokens=np.array([len(one) for one in prompts])[request],
        generated_tokens=age,
        remaining_tokens=lengths[request] - age,
        censored=cut[request],
        max_tokens=caps[request],
        requests=Requests(
            request_id=[one.request_id for one in answers],
            group=group,
            total_tokens=lengths,
            censored=cut,
            finish_reason=[one.finish_reason for one in answers],
            task=[one.task for one in answers],
            temperature=temperature,
            prompt_token_ids=[*prompts],
            output_token_ids=[[*map(int, one.answer)] for one in answers],
        ),
        session=SESSION,
    )
    words = np.stack([embedding.vector(embedding.own_tokens(one)[0]) for one in prompts])
    return _Rows(table, states, words)


class _Data(RowsDataModule):
    """Rows that are in memory, split by prompt."""

    def __init__(self, table: RowTable, seed: int) -> None:
        super().__init__(Path(), batch_size=512, cut_requests="censor")
        groups = np.random.default_rng(seed).permutation(table.requests.group.max() + 1)
        validation = np.isin(table.requests.group, groups[: round(VALIDATION * len(groups))])
        of = validation[table.request]
        self.parts = {"train": table.select(~of), "validation": table.select(of)}


def _trained(rows: _Rows, kinds: Sequence[str], seed: int) -> SurvivalMLP:
    """Train an arm's network until the validation likelihood gets no better."""
    L.seed_everything(seed, verbose=False)
    data = _Data(rows.of(kinds), seed)
    training = SurvivalTraining(lr=3e-4)
    with TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor=training.monitor)
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=100,
            callbacks=[EarlyStopping(training.monitor, patience=5), best],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(training, datamodule=data)
        kept = torch.load(best.best_model_path, weights_only=True)
    training.load_state_dict(kept["state_dict"])
    training.eval()
    training.finish(data)
    assert isinstance(training.predictor, SurvivalMLP)
    return training.predictor


def _errors(predictor: SurvivalMLP, table: RowTable) -> FloatArray:
    """Return squared errors of P(R > h) of each row, [n_rows, n_horizons]; nan beyond the cap."""
    horizons = _horizons(table)
    said = predictor.forecast(request_rows(table)).at(horizons)
    errors = (said - (table.remaining_tokens[:, None] > horizons)) ** 2
    return np.where(table.tokens_left()[:, None] > horizons, errors, np.nan)


def _horizons(table: RowTable) -> IntArray:
    return np.arange(1, int(table.tokens_left().max()), STEP)


def _figures(errors: Mapping[str, FloatArray], table: RowTable) -> dict[str, float]:
    """Return each arm's scores after each age, and the gain over the newest state alone."""
    figures: dict[str, float] = {}
    for age in SCORED:
        of = np.flatnonzero(table.generated_tokens == age)
        if not len(of):
            continue
        draws = np.random.default_rng(age).integers(0, len(of), (RESAMPLES, len(of)))
        scores = {
            arm: np.array([_score(found[of[rows]]) for rows in [np.arange(len(of)), *draws]])
            for arm, found in errors.items()
        }
        figures[f"answers_{age}"] = len(of)
        for arm, values in scores.items():
            figures[f"ibs_{arm}_{age}"] = values[0]
            if arm != "newest":
                gains = 100 * (1 - values / scores["newest"])
                figures[f"gain_{arm}_{age}"] = gains[0]
                half = np.diff(np.percentile(gains[1:], [2.5, 97.5]))[0] / 2
                figures[f"gain_{arm}_{age}_half_interval"] = half
    return figures


def _score(errors: FloatArray) -> float:
    """Return the integrated Brier score: the mean over horizons of that of all who can reach it."""
    known = ~np.isnan(errors).all(axis=0)
    return float(np.nanmean(errors[:, known], axis=0).mean())


if __name__ == "__main__":
    main()
