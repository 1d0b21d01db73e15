"""Predicting answer lengths from prompts: buckets, encoder, forest, checkpoints, the command.

The encoder here is tiny and starts at random: these tests are of the mechanics.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_dataset import ended, new_session, step_rows
from transformers import AutoTokenizer, BertConfig, BertModel

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_schema import split_requests
from predictor import CheckpointError, PointForecast, SurvivalForecast
from predictor.evaluation.survival_metrics import Outcomes
from predictor.training.row_table import load_rows
from rescheduler.commands.command_line import main
from rescheduler.papers.fine_tuning import LabelledTexts, minilm_folder
from rescheduler.papers.prompt_length import (
    BucketCurve,
    LengthBuckets,
    Prompts,
    load_length_predictor,
    load_task_classifier,
)
from rescheduler.papers.prompt_length.buckets import BucketOptions, Shape, crps
from rescheduler.papers.prompt_length.classifiers import (
    EncoderClassifier,
    EncoderOptions,
    ForestOptions,
    LengthForest,
    train_classifier,
)
from rescheduler.papers.prompt_length.length_predictor import save_classifier
from rescheduler.papers.prompt_length.prompt_table import load_answered_prompts

CONFIGS = Path(__file__).parents[3] / "configs" / "prompt_length"
PAPER = LengthBuckets((0, 250, 1000))
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
    return EncoderOptions(str(encoder), max_tokens=40).classifier(LABELS, TASKS, hinted)


def curve() -> BucketCurve:
    return BucketCurve(LengthBuckets((0, 20, 60)), tail_mean=40, limit=512)


def grown() -> tuple[LengthForest, Prompts, npt.NDArray[np.int64]]:
    rng = np.random.default_rng(0)
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


def test_what_cannot_be_learnt_from_is_refused(
    answered: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = tmp_path / "others.jsonl"
    others.write_text('{"id": "q1", "prompt": "What?"}\n')
    with pytest.raises(ValueError, match="none of its 120 requests is of a prompt in"):
        load_answered_prompts(answered[0], str(others), 0, {})
    for options, message in (
        ([], "no buckets: give --buckets"),
        (["--buckets", '{"all": {"edges": [500]}}'], "in one bucket: there is nothing to learn"),
        (
            ["--buckets", '{"all": {"edges": [20]}}', "--encoder.model", "nobody/nothing"],
            "model 'nobody/nothing' cannot be loaded",
        ),
    ):
        command = ["papers", "train-length", *map(str, answered), "--out", str(tmp_path / "out")]
        assert main([*command, *options]) == 1
        assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_training_tells_texts_apart(tiny_encoder: Path, tmp_path: Path) -> None:
    classifier = classifier_of(tiny_encoder, hinted=True)
    before = {name: w.clone() for name, w in classifier.backbone.named_parameters()}
    prompts = some_prompts(*(TASKS[i % 2] for i in range(64)))
    found = np.arange(64) % 2 * 2
    texts = LabelledTexts(classifier.token_ids(prompts), found)
    options = EncoderOptions(
        epochs=12, patience=12, learning_rate=1e-2, batch_size=8, train_layers=1
    )
    trained = train_classifier(classifier, texts, texts, options, tmp_path, seed=0)
    assert (classifier.probabilities(prompts).argmax(axis=1) == found).all()
    assert trained["val_loss"] < 0.3
    frozen = {name for name, w in classifier.backbone.named_parameters() if w.equal(before[name])}
    assert "embeddings.word_embeddings.weight" in frozen
    assert "encoder.layer.1.output.dense.weight" not in frozen


def test_the_hint_is_never_cut(tiny_encoder: Path) -> None:
    classifier = classifier_of(tiny_encoder, hinted=True)
    prompts = Prompts(["word " * 500], ["story"], np.array([500]), np.array([100]))
    (ids,) = classifier.token_ids(prompts)
    assert len(ids) == 40
    assert "this is a story task" in classifier.tokenizer.decode(ids)


@pytest.mark.parametrize("hinted", [True, False])
def test_an_encoder_checkpoint_forecasts_the_same(
    tiny_encoder: Path, tmp_path: Path, hinted: bool
) -> None:
    classifier = classifier_of(tiny_encoder, hinted)
    save_classifier(classifier, curve(), "acme/model", {"a": 1}, tmp_path)
    loaded = load_length_predictor(tmp_path)
    prompts = some_prompts("story", "short_answer", "story")
    assert np.array_equal(loaded.probabilities(prompts), classifier.probabilities(prompts))
    assert loaded.curve == curve()
    assert (loaded.serving_model, loaded.provenance) == ("acme/model", {"a": 1})
    card = (tmp_path / "README.md").read_text()
    assert "0–19, 20–59, ≥60" in card
    assert ("hint" in card) == hinted


def test_a_checkpoint_of_something_else_or_damaged_is_refused(
    tiny_encoder: Path, tmp_path: Path
) -> None:
    options = EncoderOptions(str(tiny_encoder), max_tokens=40)
    classifier = options.classifier(TASKS, TASKS, hinted=False)
    save_classifier(classifier, None, "acme/model", {}, tmp_path)
    prompts = some_prompts("story", "story")
    assert load_task_classifier(tmp_path).predicted(prompts) == classifier.predicted(prompts)
    with pytest.raises(CheckpointError, match="kind 'prompt_task', wanted 'prompt_length'"):
        load_length_predictor(tmp_path)
    save_classifier(grown()[0], curve(), "acme/model", {}, tmp_path)
    for damaged in ("model.safetensors", "config.json"):
        (tmp_path / damaged).write_text("{")
        with pytest.raises(CheckpointError, match=str(tmp_path)):
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
    save_classifier(forest, curve(), "acme/model", {}, tmp_path)
    loaded = load_length_predictor(tmp_path)
    assert np.array_equal(loaded.probabilities(prompts), forest.probabilities(prompts))
    assert isinstance(loaded.forecast(prompts), SurvivalForecast)


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


def test_the_command_trains_measures_and_goes_on(
    answered: tuple[Path, Path],
    tiny_encoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset, prompts = answered
    command = ["papers", "train-length", str(dataset), str(prompts), "--out", str(tmp_path)]
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


@st.composite
def curves(draw: st.DrawFn) -> BucketCurve:
    inner = draw(st.lists(st.integers(2, 3000), min_size=1, max_size=7, unique=True))
    buckets = LengthBuckets((0, *sorted(inner)))
    return BucketCurve(
        buckets,
        tail_mean=draw(st.floats(0.5, 5000)),
        limit=buckets.edges[-1] + draw(st.integers(1, 9000)),
        shape=draw(st.sampled_from(["linear", "geometric"])),
    )


@st.composite
def forecast_masses(draw: st.DrawFn) -> tuple[BucketCurve, list[list[float]]]:
    curve = draw(curves())
    mass = st.one_of(st.just(0.0), st.floats(1e-9, 1.0))
    row = st.lists(mass, min_size=len(curve.buckets), max_size=len(curve.buckets)).filter(any)
    return curve, draw(st.lists(row, min_size=1, max_size=4))


@given(forecast_masses())
def test_probabilities_become_a_proper_curve(drawn: tuple[BucketCurve, list[list[float]]]) -> None:
    curve, masses = drawn
    forecast = curve.forecast(masses)
    tokens = np.arange(0, curve.limit + 2, max(1, curve.limit // 400))
    survival = forecast.at(tokens)
    assert (survival[:, 0] == 1).all()
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    assert (forecast.at(float(curve.limit)) == 0).all()
    assert (forecast.mean() >= 1).all()


@given(forecast_masses())
def test_every_bucket_keeps_its_probability(drawn: tuple[BucketCurve, list[list[float]]]) -> None:
    curve, masses = drawn
    shares = np.array(masses) / np.sum(masses, axis=1, keepdims=True)
    np.testing.assert_allclose(curve.buckets.masses(curve.forecast(masses)), shares, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "survival"),
    [("linear", [1, 2 / 3, 1 / 3, 0]), ("geometric", [1, 1 / 2, 1 - np.log(3) / np.log(4), 0])],
)
def test_the_first_bucket_by_hand(shape: Shape, survival: list[float]) -> None:
    # Lengths 1, 2 and 3: alike; or so that 1 and 2-3 tokens, one doubling each, are alike.
    curve = BucketCurve(LengthBuckets((0, 4)), tail_mean=10, limit=100, shape=shape)
    np.testing.assert_allclose(curve.forecast([[1.0, 0.0]]).at([0, 1, 2, 3])[0], survival)


def test_the_tail_is_exponential() -> None:
    curve = BucketCurve(PAPER, tail_mean=300, limit=30_000)
    forecast = curve.forecast([[0.0, 0.0, 1.0]])
    np.testing.assert_allclose(forecast.at([999, 1299, 1599])[0], [1, np.exp(-1), np.exp(-2)], 1e-2)
    np.testing.assert_allclose(forecast.mean(), 999 + 300 + 0.5, rtol=5e-3)


def test_the_tail_is_fitted_with_cut_requests_as_cut() -> None:
    # Beyond 999: 1 + 501 + 25 tokens, of which two requests are known to have ended.
    totals, cut = np.array([10, 1000, 1500, 1024]), np.array([False, False, False, True])
    assert BucketCurve.fit(PAPER, totals, cut, 8192).tail_mean == 527 / 2
    all_cut = BucketCurve.fit(PAPER, np.array([1024, 1024]), np.array([True, True]), 8192)
    assert all_cut.tail_mean == 50
    nobody = BucketCurve.fit(PAPER, np.array([5, 300]), np.array([False, False]), 8192)
    assert nobody.tail_mean == 1000


def test_other_forecasts_have_bucket_masses_too() -> None:
    masses = PAPER.masses(PointForecast.new([10.0, 250.0, 1000.0, 1200.0]))
    assert masses.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]


def test_ways_to_give_buckets() -> None:
    by_time = BucketOptions(seconds=(0.5, 2.0, 8.0), tokens_per_second=500)
    assert by_time.buckets().edges == (0, 250, 1000, 4000)
    assert BucketOptions(edges=(256, 2048)).buckets().names == ("0–255", "256–2047", "≥2048")
    assert BucketOptions(width=250, until=1000).buckets().edges == (0, 250, 500, 750, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BucketOptions(edges=(250,), width=250, until=1000), "given by edges"),
        (BucketOptions(width=250), "given by edges"),
        (BucketOptions(seconds=(1.0,)), "given by edges"),
        (BucketOptions(edges=()), "begin at 0"),
        (BucketOptions(edges=(1, 5)), "begin at 0, then at 2"),
        (BucketOptions(edges=(500, 250)), "must ascend"),
        (BucketOptions(width=0, until=10), "no buckets of 0"),
        (BucketOptions(seconds=(1.0,), tokens_per_second=0), "must be positive"),
        (BucketOptions(seconds=(2.0, 1.0), tokens_per_second=10), "must ascend"),
    ],
)
def test_invalid_buckets_are_refused(options: BucketOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.buckets()
