"""Datasets and predictors on the Hugging Face Hub: pushed there, pulled from there."""

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NoReturn

import yaml
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from data_collection.files import create_private_folder

_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_OF_EVERY_REPOSITORY = {".gitattributes", "README.md"}


class HubError(ValueError):
    """Something cannot be pushed to the Hub, or pulled from there."""


@dataclass(frozen=True)
class Shared:
    """What is shared in a repository.

    Attributes:
        kind: of the repository, as the Hub names it.
        title: what is in it.
        files: names of its files; others stay where they are. No name leads out of a folder.
        needed: names of files; each is of at least one of them in every such repository.
    """

    kind: Literal["dataset", "model"]
    title: str
    files: re.Pattern[str]
    needed: Mapping[str, re.Pattern[str]]

    def refuse_other(self, repository: str, names: Collection[str]) -> None:
        """Refuse a repository that holds something else.

        Raises:
            HubError: names the files that are missing.
        """
        for shown, pattern in self.needed.items():
            if not any(pattern.fullmatch(name) for name in names):
                raise HubError(f"{repository}: not a {self.title} of Headway: no {shown}")


def is_repository(name: str) -> bool:
    """Return whether a name can be a repository's, ``OWNER/NAME``."""
    return bool(_REPOSITORY.fullmatch(name)) and ".." not in name and "--" not in name


def refuse_repository(name: str) -> None:
    """Refuse a name that no repository can have.

    Raises:
        HubError: it is not ``OWNER/NAME``.
    """
    if not is_repository(name):
        raise HubError(
            f"{name}: not the name of a repository; write OWNER/NAME, such as me/lengths"
        )


def refuse_license(name: str | None) -> None:
    """Refuse what cannot be the identifier of a licence.

    Raises:
        HubError: it is not one, such as ``apache-2.0``.
    """
    if name is not None and not _LICENSE.fullmatch(name):
        raise HubError(f"--license {name}: not an identifier such as apache-2.0 or cc-by-4.0")


def front_matter(fields: Mapping[str, Any]) -> str:
    """Return what the Hub reads of a card; fields that are empty are left out."""
    fields = {name: value for name, value in fields.items() if value}
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1_000_000)
    return f"---\n{text}---\n"


def describe_push(
    shared: Shared, repository: str, private: bool, contents: Collection[str], files: Path
) -> str:
    """Return what a push sends, to whom and how much of it."""
    sizes = [path.stat().st_size for path in files.rglob("*") if path.is_file()]
    readers = "you and whom you let in" if private else "everybody"
    lines = [
        f"To {constants.ENDPOINT}, the {'private' if private else 'public'} repository "
        f"{repository} ({shared.kind}). Read by {readers}:",
        *contents,
        f"{len(sizes)} files, {sum(sizes) / 1e6:,.2f} MB",
    ]
    return "\n- ".join(lines)


@contextmanager
def staged(files: Mapping[str, Path], shared: Shared) -> Iterator[Path]:
    """Yield a temporary folder in which files have the names that they get in a repository.

    Raises:
        HubError: a name is none that a repository has.
    """
    with TemporaryDirectory(prefix="headway-") as temporary:
        for name, path in files.items():
            if not shared.files.fullmatch(name):
                raise HubError(f"{path}: a {shared.title} has no file of this name")
            link = Path(temporary) / name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
        yield Path(temporary)


def share(
    files: Mapping[str, Path],
    repository: str,
    shared: Shared,
    private: bool,
    contents: Collection[str],
    dry_run: bool,
) -> None:
    """Print what a push of files sends, and send it unless it is a dry run.

    Raises:
        HubError: as of `staged` and `push_folder`.
    """
    with staged(files, shared) as folder:
        print(describe_push(shared, repository, private, contents, folder), flush=True)
        if not dry_run:
            push_folder(folder, repository, shared, private)


def push_folder(folder: Path, repository: str, shared: Shared, private: bool) -> None:
    """Replace what a repository holds by the files of a folder, and print its address.

    The repository is made if there is none. After an interruption, the next push sends what is
    missing.

    Raises:
        HubError: there is no token, it may not write there, the repository is open to more or to
            fewer readers than asked for, it holds something else, or the Hub does not answer.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise HubError(
            f"no token: make one that may write at {constants.ENDPOINT}/settings/tokens, and set "
            "HF_TOKEN to it"
        )
    api = HfApi(library_name="headway")
    with _requests_to_the_hub(repository, shared):
        url = api.create_repo(repository, repo_type=shared.kind, private=private, exist_ok=True)
        info = api.repo_info(repository, repo_type=shared.kind)
        if bool(info.private) != private:
            raise HubError(
                f"{repository}: exists and is {'private' if info.private else 'public'}: choose "
                f"another name, or push with --private {'true' if info.private else 'false'}"
            )
        names = set(_sizes(info))
        if names - _OF_EVERY_REPOSITORY:
            shared.refuse_other(repository, names)
        kept = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        outdated = sorted(name for name in names - kept if shared.files.fullmatch(name))
        api.upload_folder(
            repo_id=repository,
            repo_type=shared.kind,
            folder_path=folder,
            commit_message=f"Push a {shared.title} of Headway",
            delete_patterns=outdated or None,
        )
    print(f"pushed: {url}")


def pull_folder(
    repository: str, folder: Path, shared: Shared, check: Callable[[Path], None]
) -> None:
    """Fetch a repository's files into a new folder.

    They are fetched into a hidden folder beside it, which is renamed when they are whole and
    checked. After an interruption, the next pull fetches what is missing. No code is run.

    Args:
        repository: ``OWNER/NAME``.
        folder: absent or empty.
        shared: what the repository holds.
        check: raises ValueError if a folder is not whole.

    Raises:
        HubError: there is no such repository, it holds something else or something damaged,
            ``folder`` is in use, or the Hub does not answer.
    """
    from huggingface_hub import HfApi, snapshot_download

    refuse_repository(repository)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HubError(f"{folder}: exists and is not an empty folder: choose another one")
    target = folder.resolve()
    temporary = target.with_name(f".{target.name}.{repository.replace('/', '--')}.part")
    with _requests_to_the_hub(repository, shared):
        api = HfApi(library_name="headway")
        info = api.repo_info(repository, repo_type=shared.kind, files_metadata=True)
        sizes = {name: n for name, n in _sizes(info).items() if shared.files.fullmatch(name)}
        shared.refuse_other(repository, sizes)
        create_private_folder(temporary)
        snapshot_download(
            repository,
            repo_type=shared.kind,
            revision=info.sha,
            local_dir=temporary,
            allow_patterns=list(sizes),
            library_name="headway",
        )
    _keep_only(temporary, sizes)
    for name, size in sizes.items():
        path = temporary / name
        if not path.is_file() or (size is not None and path.stat().st_size != size):
            _refuse_pulled(temporary, f"{repository}: {name} did not come whole; pull it again")
    try:
        check(temporary)
    except ValueError as error:
        reason = str(error).replace(f"{temporary}", repository)
        _refuse_pulled(temporary, f"{repository}: damaged, nothing was kept: {reason}", error)
    temporary.replace(target)
    fetched = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"pulled {repository} into {folder}: {len(sizes)} files, {fetched / 1e6:,.2f} MB")


def _sizes(info: Any) -> dict[str, int | None]:
    """Return the names of a repository's files, with their sizes where the Hub was asked."""
    return {file.rfilename: file.size for file in info.siblings or ()}


def _keep_only(folder: Path, names: Collection[str]) -> None:
    """Remove what an earlier pull, of another revision, or the library has left in a folder."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for path in list(folder.rglob("*")):
        if path.is_file() and str(path.relative_to(folder)) not in names:
            path.unlink()


def _refuse_pulled(folder: Path, message: str, cause: Exception | None = None) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    raise HubError(message) from cause


@contextmanager
def _requests_to_the_hub(repository: str, shared: Shared) -> Iterator[None]:
    """Say in one line why the Hub does not do what it is asked for."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:  # the library raises many kinds, also those of its HTTP client
        local = isinstance(error, OSError) and error.errno is not None
        if local and not isinstance(error, ConnectionError | HfHubHTTPError):
            raise  # a full disk
        raise HubError(f"{repository}: {_reason(error, shared)}") from error


def _reason(error: Exception, shared: Shared) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    said = " ".join(str(error).split())[:300]
    if isinstance(error, GatedRepoError):
        return "its owner must let you in first; ask on its page"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"no such {shared.kind} at {constants.ENDPOINT}, or a private one that your token "
            "(HF_TOKEN) may not read"
        )
    if status == 401:
        return f"{constants.ENDPOINT} does not accept your token; set HF_TOKEN to another one"
    if status == 403:
        return "your token may not write there; make one that may, and set HF_TOKEN to it"
    if isinstance(error, HfHubHTTPError) and status is not None:
        return f"{constants.ENDPOINT} answered {status}: {error.server_message or said}"
    return (
        f"{constants.ENDPOINT} cannot be used ({type(error).__name__}: {said}); run the command "
        "again to go on"
    )
