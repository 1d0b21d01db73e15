"""What clients read through the proxy, beside what an engine tells them directly."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from proxying import served
from running_deployment import RunningDeployment

from benchmarks.equality.cases import CASES
from benchmarks.equality.comparing import Difference, compare
from benchmarks.equality.reasons import explained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FOUND = Path(__file__).parents[3] / "benchmarks" / "results" / "equality.json"


def test_the_proxy_differs_from_vllm_where_the_documentation_says_so(
    deployment: RunningDeployment, tmp_path: Path
) -> None:
    """If it differs elsewhere, mend it, or run `benchmarks.equality` and give the reason."""
    with served(deployment, tmp_path) as proxy:
        described = proxy.deployment
        found = asyncio.run(compare(CASES, described.decode[0].url, described.proxy_url))
    documented = json.loads(FOUND.read_text())["differences"]
    assert explained(found) == msgspec.convert(documented, list[Difference])
