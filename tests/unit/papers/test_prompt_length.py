"""Predicting answer lengths from prompts: data, encoder, forest, checkpoints, the command.

The encoder here is tiny and starts at random: these tests are of the mechanics.
"""

import json
import os
import resource
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from recorded_dataset import ended, new_session, step_rows
from transformers import AutoTokenizer, BertConfig, BertModel

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_schema import DatasetError
from data_collection.dataset.split import split_requests
from predictor import CheckpointError, PointForecast, SurvivalForecast
from predictor.evaluation.survival_metrics import Outcomes
from predictor.training.row_table import load_rows
from rescheduler.commands.command_line import main
from rescheduler.papers.prompt_length import (
    BucketCurve,
    LengthBuckets,
    LengthPredictor,
    Prompts,
    load_length_predictor,
    load_task_classifier,
)
from rescheduler.papers.prompt_length.checkpoint import save_length_predictor, save_task_classifier
from rescheduler.papers.prompt_length.encoder import (
    EncoderClassifier,
    EncoderOptions,
    train_classifier,
)
from rescheduler.papers.prompt_length.forest import ForestOptions, LengthForest
from rescheduler.papers.prompt_length.prompt_table import load_answered_prompts
from rescheduler.papers.prompt_length.scores import crps
from rescheduler.papers.text_models.text_backbone import minilm_folder
from rescheduler.papers.text_models.text_batches import LabelledTexts, text_batches

CONFIGS = Path(__file__).parents[3] / "configs" / "prompt_length"
N = 120
TASKS = ("short_answer", "story")
LABELS = ("0–19", "20–59", "≥60")


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of one layer with MiniLM's vocabulary, in a folder as Hugging Face has them."""
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recorded dataset and its prompts: stories run to 80 tokens, or 100 and are cut there.

    Short answers have 5 or 30 tokens, the longer ones to longer prompts. One request was left by
    its client, and one has no prompt in the file.
    """
    folder = tmp_path_factory.mktemp("answered")
    recorder = Recorder(RecordConfig(path=str(folder / "dataset")), new_session())
    lines = []
    for i in range(N):
        story, long = i % 2 == 1, i % 4 >= 2
        total = (100 if long else 80) if story else (30 if long else 5)
        reason = "abort" if i == 8 else ("length" if total == 100 else "stop")
        name = f"prompt-p{i}-{i:08x}"
        for n in range(0, total, 20):
            recorder.on_rows(step_rows(1000 * i + n, {name: n}))
        recorder.on_finished([ended(name, total, reason)])
        text = f"Tell me a story about number {i}" if story else f"What is {i}"
        line = {"id": f"p{i}", "prompt": text + " please" * long, "task": TASKS[story]}
        lines.append(json.dumps(line))
    recorder.close()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines[:-1]) + "\n")
    return folder / "dataset", prompts


def some_prompts(*tasks: str) -> Prompts:
    n = len(tasks)
    return Prompts([f"prompt number {i}" for i in range(n)], tasks, np.arange(n), np.full(n, 100))


def classifier_of(encoder: Path, hinted: bool) -> EncoderClassifier:
    return EncoderClassifier.pretrained(str(encoder), LABELS, TASKS, hinted, 40, 0.1)


def curve() -> BucketCurve:
    return BucketCurve(LengthBuckets((0, 20, 60)), tail_mean=40, limit=512)


def grown(seed: int = 0) -> tuple[LengthForest, Prompts, npt.NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    task = [TASKS[i] for i in rng.integers(0, 2, 300)]
    prompts = Prompts([""] * 300, task, rng.integers(1, 500, 300), np.full(300, 100))
    story = np.array(task) == "story"
    found = np.where(story, 2, (prompts.prompt_tokens > 200).astype(np.int64))
    return LengthForest.grow(prompts, found, LABELS, TASKS, ForestOptions(20, 3), 0), prompts, found


def test_requests_are_joined_with_their_prompts(answered: tuple[Path, Path]) -> None:
    dataset, prompts = answered
    split = load_answered_prompts(dataset, str(prompts), 0, {"short_answer": "QnA"})
    assert (split.unmatched, split.left_out) == (1, 1)
    assert sum(len(part) for part in split.parts.values()) == N - 2
    own_split = split_requests(load_rows(dataset).requests.group, 0)
    for name, part in split.parts.items():
        assert set(part.rows.request) <= set(own_split[name])
        assert (part.prompts.max_tokens == 100).all()
        for text, task, total, cut in zip(
            part.prompts.text, part.prompts.task, part.total_tokens, part.cut, strict=True
        ):
            assert task == ("story" if text.startswith("Tell") else "QnA")
            assert total in ((80, 100) if task == "story" else (5, 30))
            assert cut == (total == 100)


def test_prompts_of_other_requests_are_refused(answered: tuple[Path, Path], tmp_path: Path) -> None:
    others = tmp_path / "others.jsonl"
    others.write_text('{"id": "q1", "prompt": "What?"}\n')
    with pytest.raises(ValueError, match="none of its 120 requests is of a prompt in"):
        load_answered_prompts(answered[0], str(others), 0, {})
    with pytest.raises(DatasetError, match="no such folder"):
        load_answered_prompts(tmp_path / "none", str(answered[1]), 0, {})


def test_batches_hold_every_text_once_and_pad_little() -> None:
    ids = [[7] * n for n in (3, 9, 4, 8, 3, 9, 1)]
    batches = text_batches(LabelledTexts(ids, np.arange(7)), 2, padding=0, seed=3)
    passes = [list(batches) for _ in range(2)]
    for found in passes:
        assert sorted(int(label) for batch in found for label in batch.labels) == list(range(7))
        for batch in found:
            lengths = [len(ids[int(label)]) for label in batch.labels]
            assert batch.attention_mask.sum(1).tolist() == lengths
            assert batch.input_ids.shape == (len(lengths), max(lengths))
            assert max(lengths) - min(lengths) <= 3
    first, second = ([batch.labels.tolist() for batch in found] for found in passes)
    assert first != second
    again = text_batches(LabelledTexts(ids, np.arange(7)), 2, padding=0, seed=3)
    assert [batch.labels.tolist() for batch in again] == first


def test_the_hint_is_never_cut(tiny_encoder: Path) -> None:
    classifier = classifier_of(tiny_encoder, hinted=True)
    prompts = Prompts(["word " * 500], ["story"], np.array([500]), np.array([100]))
    (ids,) = classifier.token_ids(prompts)
    assert len(ids) == 40
    assert "this is a story task" in classifier.tokenizer.decode(ids)


def test_probabilities_do_not_depend_on_the_batch(tiny_encoder: Path) -> None:
    classifier = classifier_of(tiny_encoder, hinted=False)
    texts = ["one", "a much longer prompt than the first one", "two words"]
    many = Prompts(texts, ["story"] * 3, np.arange(3), np.arange(3))
    together = classifier.probabilities(many)
    np.testing.assert_allclose(together.sum(axis=1), 1)
    for i, text in enumerate(texts):
        alone = classifier.probabilities(Prompts([text], ["story"], np.arange(1), np.arange(1)))
        np.testing.assert_allclose(alone[0], together[i], atol=1e-6)


@pytest.mark.parametrize("train_layers", [None, 1])
def test_training_tells_texts_apart(
    tiny_encoder: Path, tmp_path: Path, train_layers: int | None
) -> None:
    classifier = classifier_of(tiny_encoder, hinted=True)
    before = {name: w.clone() for name, w in classifier.backbone.named_parameters()}
    prompts = some_prompts(*(TASKS[i % 2] for i in range(64)))
    found = np.arange(64) % 2 * 2
    texts = LabelledTexts(classifier.token_ids(prompts), found)
    options = EncoderOptions(
        epochs=12, patience=12, learning_rate=1e-2, batch_size=8, train_layers=train_layers
    )
    trained = train_classifier(classifier, texts, texts, options, tmp_path, seed=0)
    assert (classifier.probabilities(prompts).argmax(axis=1) == found).all()
    assert trained["val_loss"] < 0.3
    assert not (tmp_path / "training").exists()
    frozen = {name for name, w in classifier.backbone.named_parameters() if w.equal(before[name])}
    assert ("embeddings.word_embeddings.weight" in frozen) == (train_layers is not None)
    assert "encoder.layer.1.output.dense.weight" not in frozen


def test_more_layers_than_there_are_cannot_learn(tiny_encoder: Path, tmp_path: Path) -> None:
    classifier = classifier_of(tiny_encoder, hinted=False)
    texts = LabelledTexts([[1, 2]], np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="train_layers is 3, the model has 2 layers"):
        train_classifier(classifier, texts, texts, EncoderOptions(train_layers=3), tmp_path, 0)


@pytest.mark.parametrize("hinted", [True, False])
def test_an_encoder_checkpoint_forecasts_the_same(
    tiny_encoder: Path, tmp_path: Path, hinted: bool
) -> None:
    predictor = LengthPredictor(
        classifier_of(tiny_encoder, hinted), curve(), "acme/model", {"a": 1}
    )
    save_length_predictor(predictor, tmp_path)
    loaded = load_length_predictor(tmp_path)
    prompts = some_prompts("story", "short_answer", "story")
    assert np.array_equal(loaded.probabilities(prompts), predictor.probabilities(prompts))
    assert loaded.curve == predictor.curve
    assert (loaded.serving_model, loaded.provenance) == ("acme/model", {"a": 1})
    card = (tmp_path / "README.md").read_text()
    assert "0–19, 20–59, ≥60" in card
    assert ("hint" in card) == hinted


def test_a_task_checkpoint_predicts_the_same(tiny_encoder: Path, tmp_path: Path) -> None:
    classifier = EncoderClassifier.pretrained(str(tiny_encoder), TASKS, TASKS, False, 40, 0.0)
    save_task_classifier(classifier, "acme/model", {}, tmp_path)
    prompts = some_prompts("story", "story")
    assert load_task_classifier(tmp_path).predicted(prompts) == classifier.predicted(prompts)
    with pytest.raises(CheckpointError, match="kind 'prompt_task', wanted 'prompt_length'"):
        load_length_predictor(tmp_path)


def test_a_forest_is_what_scikit_learn_grows(tmp_path: Path) -> None:
    from sklearn.ensemble import RandomForestClassifier

    forest, prompts, found = grown()
    features = np.zeros((300, 3), dtype=np.float32)
    features[:, 0] = prompts.prompt_tokens
    features[np.arange(300), [1 + TASKS.index(task) for task in prompts.task]] = 1
    model = RandomForestClassifier(20, min_samples_leaf=3, random_state=0).fit(features, found)
    np.testing.assert_allclose(forest.probabilities(prompts), model.predict_proba(features))
    assert (forest.probabilities(prompts).argmax(axis=1) == found).mean() > 0.97
    save_length_predictor(LengthPredictor(forest, curve(), "acme/model", {}), tmp_path)
    loaded = load_length_predictor(tmp_path)
    assert np.array_equal(loaded.probabilities(prompts), forest.probabilities(prompts))
    assert isinstance(loaded.forecast(prompts), SurvivalForecast)


def test_a_bucket_without_training_requests_has_no_probability() -> None:
    _, prompts, found = grown()
    forest = LengthForest.grow(prompts, np.minimum(found, 1), LABELS, TASKS, ForestOptions(5, 3), 0)
    probabilities = forest.probabilities(prompts)
    assert (probabilities[:, 2] == 0).all()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)


def test_an_unknown_task_is_refused_by_name(tiny_encoder: Path) -> None:
    prompts = some_prompts("story", "poem")
    with pytest.raises(ValueError, match=r"the task 'poem' was trained on; known: short_answer"):
        classifier_of(tiny_encoder, hinted=True).probabilities(prompts)
    with pytest.raises(ValueError, match="the application 'poem' was trained on"):
        grown()[0].probabilities(prompts)
    assert len(classifier_of(tiny_encoder, hinted=False).probabilities(prompts)) == 2


def test_crps_of_a_point_is_its_error_and_of_a_curve_by_hand() -> None:
    came = Outcomes(np.array([3, 10]), np.array([False, True]), np.array([10, 10]))
    assert crps(PointForecast.new([5.0, 10.0], 10), came) == 1.0
    # S = 1, 1/2, 0 at 0, 1, 2 against 1, 1, 1, 0, ...: 0 + 1/4 + 1 for the first request.
    half = SurvivalForecast.new([0, 1, 2, 10], [[1, 0.5, 0, 0]], 10)
    one = Outcomes(np.array([3]), np.array([False]), np.array([10]))
    assert crps(half, one) == pytest.approx(1.25)


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    save_length_predictor(LengthPredictor(grown()[0], curve(), "acme/model", {}), tmp_path)
    (tmp_path / damage).write_text("{")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_length_predictor(tmp_path)


def test_a_full_disk_leaves_no_checkpoint(tmp_path: Path) -> None:
    predictor = LengthPredictor(grown()[0], curve(), "acme/model", {})
    save_length_predictor(predictor, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # as if the disk were full then
    try:
        with pytest.raises(OSError, match="File too large"):
            save_length_predictor(predictor, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(CheckpointError, match=r"no config.json, so this is no checkpoint"):
        load_length_predictor(tmp_path)
    save_length_predictor(predictor, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_the_command_trains_measures_and_goes_on(
    answered: tuple[Path, Path],
    tiny_encoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset, prompts = answered
    command = ["train-length", str(dataset), str(prompts), "--out", str(tmp_path)]
    command += ["--config", str(CONFIGS / "paper.yaml"), "--encoder.model", str(tiny_encoder)]
    command += ["--encoder.epochs", "1", "--encoder.max_tokens", "40", "--limit", "512"]
    command += ["--buckets", '{"unequal": {"edges": [20, 60]}}', "--forest.min_leaf", "2"]
    assert main(command) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    scores = results["scores"]["unequal"]
    assert list(scores) == [
        *("majority", "task_majority", "forest", "encoder", "encoder_hint"),
        *("encoder_predicted_hint", "kaplan_meier"),
    ]
    # Stories are all in the last bucket; of short answers the task does not tell which of two.
    assert scores["task_majority"]["by_task"]["story"] == 1
    assert scores["majority"]["accuracy"] < scores["task_majority"]["accuracy"] < 1
    assert results["buckets"] == {"unequal": [0, 20, 60]}
    assert 0 <= results["tasks"]["accuracy"] <= 1
    report = (tmp_path / "report.md").read_text()
    assert "| Most frequent bucket of the task |" in report
    assert (tmp_path / "results.png").stat().st_size > 1000
    for name in ("unequal", "unequal-hint", "unequal-forest"):
        assert load_length_predictor(tmp_path / name).classifier.labels == LABELS

    capsys.readouterr()
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "unequal-hint: trained already" in printed
    assert "fine-tuning" not in printed
    assert json.loads((tmp_path / "results.json").read_text())["scores"] == results["scores"]

    assert main([*command, "--seed", "1"]) == 1
    assert "trained with other settings: give another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no buckets: give --buckets"),
        (["--buckets", '{"all": {"edges": [500]}}'], "in one bucket: there is nothing to learn"),
        (["--buckets", '{"all": {"edges": [20], "width": 5}}'], "given by edges"),
        (
            ["--buckets", '{"all": {"edges": [20]}}', "--encoder.model", "nobody/nothing"],
            "cannot be loaded",
        ),
        (
            ["--buckets", '{"all": {"edges": [20]}}', "--encoder.max_tokens", "4000"],
            "reads 32 to 64 tokens",
        ),
        (
            ["--buckets", '{"all": {"edges": [20]}}', "--hidden_state", "{tmp}"],
            "this is no checkpoint",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    answered: tuple[Path, Path],
    tiny_encoder: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["train-length", *map(str, answered), "--out", str(tmp_path / "out")]
    command += ["--encoder.model", str(tiny_encoder), "--encoder.max_tokens", "40"]
    command += ["--encoder.epochs", "1", *(o.replace("{tmp}", str(tmp_path)) for o in options)]
    try:
        status = main(command)
    except SystemExit as end:
        status = int(end.code or 0)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert status == 1
