"""The commands of pages that need engines, run on those of the session."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from desk import laid
from running_deployment import RunningDeployment
from shown_commands import PAGES, ROOT, How, Page, Shown, read_page

from rescheduler.engines.deployment import Deployment, read_deployment
from rescheduler.engines.launch_local import write_deployment

LOCAL = "configs/serve/local-pd.yaml"
SERVE = Shown(f"headway serve --config {LOCAL}", How("engines", ""))
SHOWING = [page for path in PAGES if (page := read_page(path)).shown("engines")]


def ports_of(deployment: Deployment) -> Iterator[int]:
    for instance in deployment.instances:
        for address in (instance.url, instance.control, instance.telemetry):
            yield int(str(address).rpartition(":")[2])
    yield from (deployment.proxy.port, deployment.proxy.admin_port)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", SHOWING, ids=lambda page: page.name)
def test_the_commands_of_a_page(
    deployment: RunningDeployment, page: Page, tmp_path: Path, smollm2: Path
) -> None:
    """In their order, those that serve until the page is at its end."""
    del smollm2  # is prepared
    shown_ports = ports_of(read_deployment(ROOT / LOCAL))
    ports = dict(zip(shown_ports, ports_of(deployment.deployment), strict=True))
    page.stand_ins = {
        name: what for name, what in page.stand_ins.items() if what == "the deployment"
    } | {LOCAL: "the deployment"}

    def described(path: Path) -> None:
        write_deployment(deployment.deployment, path)

    with laid(tmp_path, page, {"the deployment": described}, ports) as desk, ExitStack() as beside:
        commands, config = page.shown("engines"), None
        if not any(" serve " in one.text for one in commands):
            desk.run(SERVE, beside)
        for command in commands:
            if command.words[:2] == ["headway", "serve"]:
                beside.close()  # a page that serves twice ends the first one in between
                config = yaml.safe_load(Path(command.words[3]).read_text())
                assert config["model"] == "smollm2"
            printed = desk.run(command, beside)
            if command.words[0] == "curl" and "stream" not in command.text:
                assert json.loads(printed)
