"""The configurations, checkpoints and recordings that come with Headway.

A checkout has them at its root, an installation within this package (see setup.py), and they have
the same relative paths in both: ``checkpoints/rl-router`` is found from every folder.
"""

from difflib import get_close_matches
from pathlib import Path

_INSTALLED = Path(__file__).parent / "shipped"
_FOLDER = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1]
_SHIPPED = ("checkpoints", "configs", "recordings")


def find_shipped(path: Path | str) -> Path:
    """Return a path as it is; where it leads nowhere, the shipped file or folder of that path."""
    path = Path(path)
    shipped = _FOLDER / path
    is_shipped = path.parts[:1] in [(name,) for name in _SHIPPED] and ".." not in path.parts
    return shipped if is_shipped and not path.exists() and shipped.exists() else path


def find_config(name: str) -> Path:
    """Return the file of that path, or the shipped configuration of that name.

    A name is the last parts of its path, with or without suffix: ``local-pd``, ``serve/local-pd``.

    Raises:
        ValueError: there is neither, or several configurations have this name.
    """
    path = find_shipped(Path(name).expanduser())
    if path.exists() and not path.is_dir():  # but a pipe, too
        return path
    configs = _FOLDER / "configs"
    known = {str(one.relative_to(configs).with_suffix("")): one for one in configs.rglob("*.yaml")}
    wanted = name.removesuffix(".yaml")
    meant = sorted(one for one in known if f"/{one}".endswith(f"/{wanted}"))
    if len(meant) == 1:
        return known[meant[0]]
    if meant:
        raise ValueError(f"several configurations are called {name}: {', '.join(meant)}")
    names = {one.rpartition("/")[2] for one in known}
    near = get_close_matches(wanted.rpartition("/")[2], sorted(names), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{name}: no such file, and no configuration of this name is shipped{hint}")
