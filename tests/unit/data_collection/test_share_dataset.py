"""Datasets on the Hub: pushed, pulled, and every reason to do neither."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from checked_commands import exit_status
from hub_stand_in import READ_TOKEN, StandIn, hub_stand_in, use_hub
from recorded_dataset import new_session, record

from data_collection.capture.capture_config import RecordConfig
from data_collection.capture.recorder import Recorder
from data_collection.dataset.dataset_schema import read_columns, requests_files, rows_files
from data_collection.dataset.validate_dataset import validate

NAME, KEY = "me/lengths", ("dataset", "me/lengths")
TEXTS = ["prompt_token_ids", "output_token_ids"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with hub_stand_in() as stand_in:
        use_hub(stand_in.url, monkeypatch)
        yield stand_in


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    record(tmp_path / "recorded")
    return tmp_path / "recorded"


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Return the one line that a command is refused with."""
    capsys.readouterr()
    assert exit_status("dataset", *words) == 1
    line, *more = capsys.readouterr().err.splitlines()
    assert not more
    return line


def untouched(stand_in: StandIn) -> bool:
    return not any(one.startswith(("POST", "PUT")) for one in stand_in.requests)


def pushed(stand_in: StandIn, dataset: Path) -> None:
    assert exit_status("dataset", "push", dataset, NAME, "--with-prompts") == 0
    stand_in.requests.clear()


# Pushed and pulled.


def test_what_was_pushed_is_pulled(
    hub: StandIn, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--with-prompts", "--license", "cc-by-4.0")
    assert exit_status("dataset", "push", dataset, NAME, *words) == 0
    printed = capsys.readouterr().out
    assert f"To {hub.url}, the private repository {NAME} (dataset)" in printed
    assert "the prompts and answers of 20 requests, as token ids" in printed
    assert f"pushed: {hub.url}/datasets/{NAME}" in printed
    assert hub.repositories[KEY].private
    assert any(one.startswith("PUT /objects/") for one in hub.requests), "large files go by LFS"

    out = tmp_path / "pulled"
    assert exit_status("dataset", "pull", NAME, out) == 0
    printed = capsys.readouterr().out
    assert "valid: " in printed and f"pulled {NAME} into {out}" in printed
    validate(out)
    own, theirs = contents(dataset), contents(out)
    card = theirs.pop("README.md").decode()
    del own["README.md"]
    assert theirs == own, "no bytes are changed, and nothing is left beside them"
    assert not list(tmp_path.glob(".*"))
    fields = yaml.safe_load(card.split("---")[1])
    assert fields["license"] == "cc-by-4.0" and fields["base_model"] == "acme/small-model"
    assert fields["size_categories"] == ["n<1K"] and len(fields["configs"]) == 2
    assert "token ids of prompt and answer" in card


def test_prompts_and_answers_stay_here_unless_they_are_asked_for(
    hub: StandIn, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(dataset)
    assert exit_status("dataset", "push", dataset, NAME) == 0
    said = "no prompts and answers; --with-prompts sends those of 20 requests"
    assert said in capsys.readouterr().out
    assert contents(dataset) == before
    assert exit_status("dataset", "pull", NAME, tmp_path / "out") == 0
    assert "no token ids" in (tmp_path / "out" / "README.md").read_text()
    kept = pq.ParquetFile(requests_files(dataset)[0]).schema_arrow.names
    for mine, other in zip(requests_files(dataset), requests_files(tmp_path / "out"), strict=True):
        texts = read_columns([other], TEXTS)
        assert all(texts[name].null_count == len(texts) for name in TEXTS)
        rest = [name for name in kept if name not in TEXTS]
        assert read_columns([other], rest) == read_columns([mine], rest)
    for mine, other in zip(rows_files(dataset), rows_files(tmp_path / "out"), strict=True):
        assert mine.read_bytes() == other.read_bytes()


def test_a_dry_run_sends_nothing(
    hub: StandIn,
    dataset: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    words = ("--dry-run", "--private", "false")
    assert exit_status("dataset", "push", dataset, NAME, *words) == 0
    printed = capsys.readouterr().out
    assert "the public repository me/lengths (dataset). Read by everybody" in printed
    assert not hub.requests


def test_a_public_repository_is_made_only_on_request(hub: StandIn, dataset: Path) -> None:
    assert exit_status("dataset", "push", dataset, NAME, "--private", "false") == 0
    assert not hub.repositories[KEY].private


def test_a_second_push_replaces_the_files_of_the_first(
    hub: StandIn, dataset: Path, tmp_path: Path
) -> None:
    pushed(hub, dataset)
    record(tmp_path / "second", new_session("20250102T000000-2"), prefix="b")
    hub.repositories[KEY].files["notes.txt"] = b"mine"
    pushed(hub, tmp_path / "second")
    second = contents(tmp_path / "second")
    assert set(hub.repositories[KEY].files) == {*second, ".gitattributes", "notes.txt"}


def test_other_files_are_neither_pushed_nor_pulled(
    hub: StandIn, dataset: Path, tmp_path: Path
) -> None:
    (dataset / "evaluation").mkdir()
    (dataset / "evaluation" / "report.md").write_text("mine")
    (dataset / "data" / "notes.txt").write_text("mine")
    pushed(hub, dataset)
    stored = hub.repositories[KEY].files
    assert not [name for name in stored if "report" in name or "notes" in name]
    for name in ("../escaped.json", "sessions/../../escaped.json", "/tmp/escaped", "run.py"):
        stored[name] = b"theirs"
    assert exit_status("dataset", "pull", NAME, tmp_path / "a" / "b" / "out") == 0
    assert not list(tmp_path.rglob("escaped*")) and not list(tmp_path.rglob("*.py"))
    assert not Path("/tmp/escaped").exists()


def test_an_interrupted_pull_goes_on(
    hub: StandIn, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed(hub, dataset)
    last = rows_files(dataset)[-1].name
    hub.answers = lambda method, path: 404 if method == "GET" and path.endswith(last) else None
    assert NAME in refusal(capsys, "pull", NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    before = [name for name in hub.downloads() if not name.endswith(last)]
    assert before
    hub.answers = lambda method, path: None
    hub.requests.clear()
    assert exit_status("dataset", "pull", NAME, tmp_path / "out") == 0
    assert not set(before) & set(hub.downloads()), "what had come is not fetched again"
    validate(tmp_path / "out")


def test_what_an_earlier_revision_has_left_is_removed(
    hub: StandIn, dataset: Path, tmp_path: Path
) -> None:
    pushed(hub, dataset)
    left = tmp_path / ".out.me--lengths.part" / "data" / "rows-old.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"old")
    assert exit_status("dataset", "pull", NAME, tmp_path / "out") == 0
    assert not list(tmp_path.rglob("rows-old.parquet"))


def test_the_environment_says_where_the_hub_is(
    hub: StandIn, dataset: Path, tmp_path: Path, headway_command: list[str]
) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    for words in (["push", dataset, NAME, "--with-prompts"], ["pull", NAME, tmp_path / "out"]):
        command = [*headway_command, "dataset", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr
    own, theirs = contents(dataset), contents(tmp_path / "out")
    assert own.keys() == theirs.keys()
    assert {name for name in own if own[name] != theirs[name]} <= {"README.md"}


# Refused.


@pytest.mark.parametrize("name", ["lengths", "me/", "/lengths", "me/a/b", "me/a b", "../x", "a/.."])
def test_a_name_without_an_owner_is_refused(
    hub: StandIn, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for words in (("push", dataset, name), ("pull", name, tmp_path / "out")):
        assert "write OWNER/NAME" in refusal(capsys, *words)
    assert not hub.requests


def test_a_folder_without_a_whole_dataset_is_not_pushed(
    hub: StandIn, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "absent: no such folder" in refusal(capsys, "push", tmp_path / "absent", NAME)
    (tmp_path / "empty").mkdir()
    assert "not a dataset" in refusal(capsys, "push", tmp_path / "empty", NAME)
    Recorder(RecordConfig(path=str(tmp_path / "none")), new_session()).close()
    assert "nothing was recorded" in refusal(capsys, "push", tmp_path / "none", NAME)
    shard = rows_files(dataset)[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert exit_status("dataset", "push", dataset, NAME) == 1
    assert f"{shard.name}: not a whole Parquet file" in capsys.readouterr().err
    assert untouched(hub)


def test_a_licence_is_an_identifier(
    hub: StandIn, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, "push", dataset, NAME, "--license", "Do what you want")
    assert "not an identifier such as apache-2.0" in message


@pytest.mark.parametrize(
    ("token", "name", "said"),
    [
        (None, NAME, "no token: make one that may write at"),
        ("hf_wrong", NAME, "does not accept your token"),
        (READ_TOKEN, NAME, "your token may not write there"),
        ("hf_of_me", "others/lengths", "your token may not write there"),
    ],
)
def test_a_push_needs_a_token_that_may_write(
    hub: StandIn,
    dataset: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    name: str,
    said: str,
) -> None:
    use_hub(hub.url, monkeypatch, token)
    assert said in refusal(capsys, "push", dataset, name)
    assert not hub.repositories


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_is_not_open_to_other_readers_than_was_asked_for(
    hub: StandIn, dataset: Path, capsys: pytest.CaptureFixture[str], private: bool
) -> None:
    hub.add("dataset", NAME, {}, private=private)
    asked, other = ("false", "private") if private else ("true", "public")
    message = refusal(capsys, "push", dataset, NAME, "--private", asked)
    assert f"exists and is {other}" in message
    assert not hub.repositories[KEY].files


def test_a_repository_of_something_else_is_left_alone(
    hub: StandIn, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("dataset", NAME, {"data/train.parquet": b"theirs"}, private=True)
    for words in (("push", dataset, NAME), ("pull", NAME, tmp_path / "out")):
        message = refusal(capsys, *words)
        assert f"{NAME}: not a dataset of Headway: no sessions/*.json" in message
    assert list(hub.repositories[KEY].files) == ["data/train.parquet"]
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.part"))


def test_a_repository_that_cannot_be_read_is_said(
    hub: StandIn,
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "no such dataset" in refusal(capsys, "pull", NAME, tmp_path / "out")
    pushed(hub, dataset)
    use_hub(hub.url, monkeypatch, None)
    assert "or a private one" in refusal(capsys, "pull", NAME, tmp_path / "out")
    use_hub(hub.url, monkeypatch)
    hub.answers = lambda method, path: 500
    assert "answered 500: as the test wants" in refusal(capsys, "pull", NAME, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_folder_that_is_in_use_is_kept(
    hub: StandIn, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed(hub, dataset)
    (tmp_path / "file").write_text("mine")
    before = contents(dataset)
    for out in (dataset, tmp_path / "file"):
        assert "exists and is not an empty folder" in refusal(capsys, "pull", NAME, out)
    assert contents(dataset) == before and not hub.requests
    (tmp_path / "empty").mkdir()
    assert exit_status("dataset", "pull", NAME, tmp_path / "empty") == 0


def test_a_damaged_dataset_is_not_kept(
    hub: StandIn, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed(hub, dataset)
    stored, shard = hub.repositories[KEY].files, f"data/{rows_files(dataset)[0].name}"
    stored[shard] = stored[shard][:-100]
    assert exit_status("dataset", "pull", NAME, tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert f"{NAME}: damaged, nothing was kept" in message and "not a whole Parquet" in message
    assert str(tmp_path) not in message
    assert not list(tmp_path.glob("*out*"))


def test_a_hub_that_cannot_be_reached_is_said(
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_hub("http://127.0.0.1:9", monkeypatch)
    for words in (("push", dataset, NAME), ("pull", NAME, tmp_path / "out")):
        message = refusal(capsys, *words)
        assert "http://127.0.0.1:9 cannot be used (ConnectError:" in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in refusal(capsys, "pull", NAME, tmp_path / "out")
