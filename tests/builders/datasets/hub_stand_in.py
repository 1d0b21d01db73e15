"""A stand-in for the Hugging Face Hub on this machine, which `huggingface_hub` talks to.

It keeps repositories in memory and serves what a push and a pull call: making a repository, its
description, the listing of its files, uploads through LFS or within a commit, and downloads.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

OWNER, TOKEN, READ_TOKEN = "me", "hf_of_me", "hf_that_reads"
_LARGEST_REGULAR = 2000


@dataclass
class Repository:
    """A repository: its files, and who can read it."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        contents = json.dumps([(n, _digest(c)) for n, c in sorted(self.files.items())])
        return hashlib.sha1(contents.encode()).hexdigest()


@dataclass
class StandIn:
    """What the stand-in holds, and what it was asked for.

    Attributes:
        repositories: by kind and name, such as ``("dataset", "me/lengths")``.
        requests: method and path of every request, in order.
        answers: called with method and path before anything else; returns a status to refuse with.
    """

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    answers: Callable[[str, str], int | None] = lambda method, path: None

    def add(self, kind: str, name: str, files: dict[str, bytes], private: bool = False) -> None:
        """Add a repository, as if somebody had pushed it."""
        self.repositories[kind, name] = Repository(private, files)

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded, in order."""
        pattern = re.compile(r"GET .*/resolve/[^/]+/(.*)")
        return [found[1] for one in self.requests if (found := pattern.fullmatch(one))]


@contextmanager
def hub_stand_in() -> Iterator[StandIn]:
    """Serve a stand-in on a free port of this machine."""
    stand_in = StandIn()
    handler = type("Handler", (_Handler,), {"stand_in": stand_in})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        stand_in.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield stand_in
        finally:
            server.shutdown()
            thread.join()


def use_hub(url: str, monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN) -> None:
    """Let `huggingface_hub`, which has read its environment, talk to a stand-in."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
    bars = import_module("huggingface_hub.utils.tqdm")  # whose package has a class of this name
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", "/dev/null")
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does."""

    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # a client that was refused has left
            self.close_connection = True

    def do_GET(self) -> None:
        self._answer(b"")

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_PUT(self) -> None:
        self._answer(self._body())

    def do_POST(self) -> None:
        self._answer(self._body())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, body: bytes) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.stand_in.requests.append(f"{self.command} {path}")
        status = self.stand_in.answers(self.command, path)
        if status is not None:
            self._send({"error": "as the test wants"}, status)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._send({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/objects/(\w+)", path):
            assert _digest(body) == found[1]
            self.stand_in.objects[found[1]] = body
            self._send({})
        elif found := re.fullmatch(
            r"/(datasets/)?([^/]+/[^/]+?)\.git/info/lfs/objects/batch", path
        ):
            self._in(found[1], found[2], self._batch, json.loads(body))
        elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.*)", path):
            self._in(found[1], found[2], self._resolve, found[3])
        elif found := re.fullmatch(r"/api/(dataset|model)s/([^/]+/[^/]+)(?:/(.*))?", path):
            kind, name, rest = found.groups()
            what = (rest or "").partition("/")[0]
            actions = {"preupload": self._preupload, "commit": self._commit, "tree": self._tree}
            action = actions.get(what, self._describe)
            value: object = body if what in ("preupload", "commit") else parse_qs(url.query)
            self._in("datasets/" if kind == "dataset" else None, name, action, value)
        else:
            self._send({"error": f"the stand-in knows no {self.command} {path}"}, 501)

    @property
    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _in(
        self,
        prefix: str | None,
        name: str,
        action: Callable[[Repository, str, Any], None],
        value: Any,
    ) -> None:
        repository = self.stand_in.repositories.get(("dataset" if prefix else "model", name))
        readers = (TOKEN, READ_TOKEN)
        if repository is None or (repository.private and self._token not in readers):
            self._send({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif self.command == "POST" and self._token != TOKEN:
            self._send({"error": "You may not write here"}, 403)
        else:
            action(repository, name, value)

    def _create(self, asked: dict[str, Any]) -> None:
        kind, name = asked["type"], f"{asked['organization']}/{asked['name']}"
        known = (kind, name) in self.stand_in.repositories
        if self._token not in (TOKEN, READ_TOKEN):
            message = "Invalid credentials in Authorization header"
            self._send({"error": message}, 401, {"X-Error-Message": message})
        elif asked["organization"] != OWNER or self._token != TOKEN:
            self._send({"error": f"You may not create under {asked['organization']}"}, 403)
        else:
            if not known:
                files = {".gitattributes": b"*.parquet filter=lfs\n"}
                private = asked.get("visibility") == "private"
                self.stand_in.repositories[kind, name] = Repository(private, files)
            prefix = "datasets/" if kind == "dataset" else ""
            self._send({"url": f"{self.stand_in.url}/{prefix}{name}"}, 409 if known else 200)

    def _describe(self, repository: Repository, name: str, query: dict[str, Any]) -> None:
        sizes = "blobs" in query
        siblings = [
            {"rfilename": file, **({"size": len(content), "blobId": "0"} if sizes else {})}
            for file, content in repository.files.items()
        ]
        described = {"id": name, "sha": repository.sha, "private": repository.private}
        self._send({**described, "tags": [], "siblings": siblings})

    def _tree(self, repository: Repository, name: str, query: dict[str, Any]) -> None:
        self._send(
            [
                {"type": "file", "path": file, "size": len(content), "oid": _digest(content)[:40]}
                for file, content in repository.files.items()
            ]
        )

    def _preupload(self, repository: Repository, name: str, body: bytes) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] > _LARGEST_REGULAR else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._send({"files": modes})

    def _batch(self, repository: Repository, name: str, asked: dict[str, Any]) -> None:
        objects = []
        for item in asked["objects"]:
            upload = {"upload": {"href": f"{self.stand_in.url}/objects/{item['oid']}"}}
            known = item["oid"] in self.stand_in.objects
            objects.append(item if known else item | {"actions": upload})
        self._send({"transfer": "basic", "objects": objects})

    def _commit(self, repository: Repository, name: str, body: bytes) -> None:
        for operation in map(json.loads, body.splitlines()):
            key, value = operation["key"], operation["value"]
            if key == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                repository.files[value["path"]] = self.stand_in.objects[value["oid"]]
            elif key == "deletedFile":
                del repository.files[value["path"]]
        url = f"{self.stand_in.url}/{name}/commit/{repository.sha}"
        self._send({"commitUrl": url, "commitOid": repository.sha})

    def _resolve(self, repository: Repository, name: str, file: str) -> None:
        if file not in repository.files:
            self._send({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content = repository.files[file]
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": repository.sha}
        self._write(content, 200, {"Accept-Ranges": "bytes", **headers})

    def _send(
        self, value: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        named = {"Content-Type": "application/json", **(headers or {})}
        self._write(json.dumps(value).encode(), status, named)

    def _write(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
