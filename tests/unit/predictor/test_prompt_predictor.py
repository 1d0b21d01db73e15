"""Forecasts from prompts alone: the vector of a prompt, its training, and what is served."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded_dataset import new_session, record
from scipy.stats import spearmanr
from tokenizers import Tokenizer
from training_runs import fit

from data_collection.dataset.dataset_commands import TRANSCRIPTS_SCHEMA
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import CheckpointError, ModelMismatchError
from predictor.prompts.prompt_predictor import (
    PromptEmbedding,
    PromptEmbeddingError,
    PromptPredictor,
)
from predictor.training.rows_data_module import load_prompt_rows

ROOT = Path(__file__).parents[3]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHORT, LONG = "Answer yes or no: is {} red?", "Write a long story about {} and its many adventures."
THINGS = ("a boat", "the moon", "my cat", "an apple", "this road", "the sea", "one tree", "a king")


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a message in the model's chat template."""
    template = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer.encode(template).ids
    return ids


@pytest.fixture(scope="module")
def transcripts(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with answers of 5 to 10 tokens, and stories of 200 to 400, some of them cut."""
    tokenizer, generator = Tokenizer.from_file(str(smollm2 / "tokenizer.json")), random.Random(0)
    entries = []
    for i in range(240):
        story = bool(i % 2)
        text = (LONG if story else SHORT).format(generator.choice(THINGS))
        tokens = generator.randint(200, 400) if story else generator.randint(5, 10)
        entries.append(
            {
                "id": f"prompt-{i}",
                "sample_index": 0,
                "prompt_token_ids": chat(tokenizer, text),
                "output_token_ids": list(range(1, min(tokens, 350) + 1)),
                "finish_reason": "length" if tokens > 350 else "stop",
                "max_tokens": 350,
                "temperature": 0.8,
                "top_p": 1.0,
                "source": "test",
                "task": "story" if story else "question",
            }
        )
    file = tmp_path_factory.mktemp("transcripts") / "round-1.parquet"
    described = {"headway.model": MODEL, "headway.revision": "test"}
    schema = TRANSCRIPTS_SCHEMA.with_metadata(described)
    pq.write_table(pa.Table.from_pylist(entries, schema), file)
    return file


@pytest.fixture(scope="module")
def checkpoint(transcripts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "prompt"
    pattern = transcripts.with_name("round-*.parquet")
    options = ("--trainer.max_epochs", "12", "--data.batch_size", "16")
    return fit("prompt", pattern, out, *options, "--model.init_args.lr", "3e-3")


@pytest.mark.slow
def test_it_learns_from_a_dataset_too(tmp_path: Path) -> None:
    dataset, out = tmp_path / "dataset", tmp_path / "checkpoint"
    record(dataset, new_session(model=MODEL, revision="test"))
    fit("prompt", dataset, out, "--trainer.max_epochs", "1")
    predictor = PromptPredictor.load(str(out))
    assert predictor.model.serving_model == MODEL
    assert predictor.longest <= 100
    assert "dataset" in (out / "dataset_card.md").read_text()


def test_a_prompt_is_known_by_its_own_tokens(smollm2: Path, tokenizer: Tokenizer) -> None:
    """The template and special tokens, which all prompts have, say nothing of one."""
    texts = ["Is a boat red?", "Write a story.", "Sum up the news", "a", "Translate 'sea' please"]
    prompts = [chat(tokenizer, text) for text in texts]
    embedding = PromptEmbedding.fit(str(smollm2), prompts, dimension=8)
    for text, prompt in zip(texts, prompts, strict=True):
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        own, length = embedding.read(text)
        assert embedding.own_tokens(prompt)[0].tolist() == own.tolist() == expected
        assert embedding.own_tokens(prompt)[1] == length == len(expected)
    assert embedding.size == 24
    assert not embedding.vector(np.array([], dtype=np.int64)).any()
    assert not embedding.vector(np.array([-1, 10**9])).any(), "an unknown token has no vector"


def test_of_a_long_text_both_ends_are_read(smollm2: Path, tokenizer: Tokenizer) -> None:
    embedding = PromptEmbedding.fit(str(smollm2), [[50, 60], [70]], dimension=8)
    text = "Write a story. " * 5_000
    own, length = embedding.read(text)
    assert len(own) < 3_000
    ids = tokenizer.encode(text).ids
    assert length == pytest.approx(len(ids), rel=0.02)
    ends, whole = embedding.own_tokens(ids)
    assert ends.tolist() == [*ids[:512], *ids[-512:]]
    assert whole == len(ids)


def test_what_no_client_limits_is_no_longer_than_what_was_seen(checkpoint: Path) -> None:
    predictor = PromptPredictor.load(str(checkpoint))
    assert predictor.longest == 350
    text = LONG.format("a horse")
    without, *others = (predictor.expected_tokens(text, *most) for most in ([], [100_000], [350]))
    assert others == [without] * 2


def test_it_learns_which_prompts_have_long_answers(checkpoint: Path, tokenizer: Tokenizer) -> None:
    predictor = PromptPredictor.load(str(checkpoint))
    for thing in ("a horse", "the river"):  # which no prompt named
        short = predictor.expected_tokens(SHORT.format(thing), 350)
        long = predictor.expected_tokens(LONG.format(thing), 350)
        assert short < 40 < 120 < long <= 350
        assert predictor.expected_tokens(LONG.format(thing), 30) <= 30
        ids = chat(tokenizer, LONG.format(thing))
        assert predictor.expected_tokens(ids, 350) == pytest.approx(long, rel=0.1)
    forecast = predictor.forecast([ids, ids], [0.8, np.nan], [350, 10])
    assert len(forecast) == 2
    assert forecast.mean()[1] <= 10


@pytest.mark.parametrize(("part", "least"), [("held-out", 0.35), ("new-tasks", 0.3)])
def test_the_shipped_one_ranks_answers_to_prompts_it_has_not_seen(part: str, least: float) -> None:
    """Spearman's rank correlation; measured 0.44 and 0.41."""
    predictor = PromptPredictor.load("checkpoints/smollm2-135m-instruct-prompt")
    file = ROOT / "transcripts" / "smollm2-135m-instruct" / f"{part}.parquet"
    answers = pq.read_table(file).to_pylist()
    read = ("prompt_token_ids", "temperature", "max_tokens")
    forecast = predictor.forecast(*([one[name] for one in answers] for name in read))
    lengths = [len(one["output_token_ids"]) for one in answers]
    assert spearmanr(forecast.mean(), lengths).statistic > least


@pytest.mark.slow
def test_cut_answers_count_as_longer_than_they_were(transcripts: Path) -> None:
    table, embedding = load_prompt_rows(transcripts, split_seed=0)
    assert table.hidden_states.shape == (240, embedding.size)
    assert table.session.layer == "prompt"
    assert set(table.remaining_tokens[table.censored]) == {350}
    assert not table.generated_tokens.any()


def test_the_card_says_what_it_reads_and_the_settings_are_kept(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    """What all prompts began with is left out of a served prompt's tokens, too."""
    card = (checkpoint / "README.md").read_text()
    assert "Reads a prompt" in card
    assert "hidden state" not in card
    settings = json.loads((checkpoint / "embedding.json").read_text())
    assert "user" in tokenizer.decode(settings["before"], skip_special_tokens=False)


def test_a_predictor_of_hidden_states_is_refused(
    survival_checkpoint: Path, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="from hidden states, not from prompts"):
        PromptPredictor.load(str(survival_checkpoint))
    reader = load_predictor(str(checkpoint))
    with pytest.raises(ModelMismatchError, match="reads prompts, not hidden states"):
        reader.refuse_other_model(new_session())
    for name in ("embedding.safetensors", "tokenizer.json", "embedding.json"):
        folder = tmp_path / name
        shutil.copytree(checkpoint, folder)
        (folder / name).write_bytes(b"damaged")
        with pytest.raises(CheckpointError):
            PromptPredictor.load(str(folder))
        if name.endswith("embedding.json"):
            for content in ("null", '{"before": 5, "after": []}', '{"before": ["a"], "after": []}'):
                (folder / name).write_text(content)
                with pytest.raises(CheckpointError, match="damaged prompt embedding"):
                    PromptPredictor.load(str(folder))
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            PromptPredictor.load(str(folder))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"trained_remaining_tokens": [0, 0]}, "has learned from no answer"),
        ("config.json", {"hidden_size": 8}, "cannot be loaded"),
        ("embedding.json", {"before": None}, "damaged prompt embedding"),
        ("embedding.json", {"after": [[[1]]]}, "damaged prompt embedding"),
        ("embedding.json", {"before": [float("nan")]}, "damaged prompt embedding"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "prompt"
    shutil.copytree(ROOT / "checkpoints" / "smollm2-135m-instruct-prompt", folder)
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(settings | changes))
    with pytest.raises(CheckpointError, match=message):
        PromptPredictor.load(str(folder))
    (folder / file).write_text('{"kind": "survival", "before": ' + "[" * 100_000)
    with pytest.raises(CheckpointError):
        PromptPredictor.load(str(folder))


def test_transcripts_that_cannot_be_read_are_refused(transcripts: Path, tmp_path: Path) -> None:
    from data_collection.dataset.dataset_schema import DatasetError

    with pytest.raises(DatasetError, match="no such file of transcripts"):
        load_prompt_rows(tmp_path / "none-*.parquet", 0)
    with pytest.raises(DatasetError, match="not a dataset recorded by Headway"):
        load_prompt_rows(tmp_path, 0)
    new_session(model=MODEL).write(tmp_path)
    with pytest.raises(DatasetError, match="no request has token ids"):
        load_prompt_rows(tmp_path, 0)
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "Why?", "answer": "Because."}\n')
    with pytest.raises(DatasetError, match="must name one model"):
        load_prompt_rows(texts, 0)
    table = pq.read_table(transcripts)
    other = tmp_path / "round-2.parquet"
    described = {"headway.model": "another/model", "headway.revision": "1"}
    pq.write_table(table.replace_schema_metadata(described), other)
    shutil.copy(transcripts, tmp_path / "round-1.parquet")
    with pytest.raises(DatasetError, match="must name one model"):
        load_prompt_rows(tmp_path / "round-*.parquet", 0)
    pq.write_table(table.drop_columns(["task"]), other)
    with pytest.raises(DatasetError, match="it has no task"):
        load_prompt_rows(other, 0)


def test_prompts_of_another_model_are_refused(smollm2: Path) -> None:
    with pytest.raises(PromptEmbeddingError, match="another model's"):
        PromptEmbedding.fit(str(smollm2), [[10**7]])
    with pytest.raises(PromptEmbeddingError, match="no prompts"):
        PromptEmbedding.fit(str(smollm2), [])
