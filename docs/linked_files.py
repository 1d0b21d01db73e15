"""Bring the files that pages link to, and that lie outside docs/, into the site (an MkDocs hook).

The README becomes the front page. Any other linked file of the repository gets a page or a copy
below `files/`, so that one relative link works in the repository and on the site; a notebook gets a
page with its outputs below `examples/`. A link to a file that does not exist is left alone, and
`mkdocs build --strict` fails on it.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
_COPIED = (".md", ".png")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the README and every linked file, those that linked pages link to included."""
    root = Path(config.config_file_path).parent
    pages = ["README.md", *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    added: set[str] = set()
    for page in pages:
        linked = {page, *_links(page, (root / page).read_text())}
        for path in sorted(linked - added):
            if path.startswith("docs/") or not (root / path).is_file():
                continue
            added.add(path)
            for file in _site_files(path, root, config):
                files.append(file)
            if path.endswith(".md") and path not in pages:
                pages.append(path)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where `on_files` has put their targets."""
    here = _repository_path(page.file.src_uri)

    def on_site(link: re.Match[str]) -> str:
        path = normpath(f"{dirname(here)}/{link['target']}".lstrip("/"))
        target = files.get_file_from_path(_site_path(path))
        if target is None:
            return link[0]
        return relpath(target.src_uri, dirname(page.file.src_uri) or ".") + (link["anchor"] or "")

    return _LINK.sub(on_site, markdown)


def _links(page: str, text: str) -> set[str]:
    return {
        normpath(f"{dirname(page)}/{link['target']}".lstrip("/")) for link in _LINK.finditer(text)
    }


def _site_path(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        return f"{path.removesuffix('.ipynb')}.md"
    return f"files/{path}" if path.endswith(_COPIED) else f"files/{path}.md"


def _repository_path(src_uri: str) -> str:
    """Return where the repository has a page of the site that may contain links."""
    if src_uri == "index.md":
        return "README.md"
    if src_uri.startswith("examples/"):
        return f"{src_uri.removesuffix('.md')}.ipynb"
    return src_uri.removeprefix("files/") if src_uri.startswith("files/") else f"docs/{src_uri}"


def _site_files(path: str, root: Path, config: MkDocsConfig) -> list[File]:
    if path.endswith(".ipynb"):
        return _notebook_page(path, root, config)
    content: str | bytes = (root / path).read_bytes()
    if not path.endswith(_COPIED):
        language = path.rpartition(".")[2] if "." in path else "text"
        content = f"# {path}\n````{language}\n{(root / path).read_text()}\n````\n"
    return [File.generated(config, _site_path(path), content=content)]


def _notebook_page(path: str, root: Path, config: MkDocsConfig) -> list[File]:
    """Return the page of a notebook, and its figures."""
    markdown, resources = MarkdownExporter().from_filename(str(root / path))
    figures = {f"{dirname(path)}/{name}": data for name, data in resources["outputs"].items()}
    found = {_site_path(path): markdown} | figures
    return [File.generated(config, name, content=content) for name, content in found.items()]
