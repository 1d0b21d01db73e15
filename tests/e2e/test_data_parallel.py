"""The ranks of docs/deploy.md on a CPU: one group, whose experts are split."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forked_vllm import post
from msgspec import to_builtins
from proxying import served
from running_deployment import PATIENT, running
from transformers import AutoModelForCausalLM

from benchmarks.support.cpu_ranks import read_steps, write_moe_model
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_local import free_ports, local_deployment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"
PROMPT = list(range(1_000, 1_020))
TOKENS = 12


def described(model: Path, logs: Path) -> Deployment:
    """The page's decode ranks, with what a CPU needs in place of its model, ports and GPUs."""
    part = PAGE.read_text().split("\n## Data and expert parallelism\n")[1]
    block = re.search(r"```yaml\n(.*?)```", part, re.DOTALL)
    assert block is not None
    values = yaml.safe_load(block[1])
    here = local_deployment(str(model), EngineOptions(), decode=2, prefill=0)
    ranks = [instance for instance in values["instances"] if instance["role"] == "decode"]
    port = str(free_ports(20)[-1])
    for rank, local in zip(ranks, here.instances, strict=True):
        place = rank["arguments"].index("--data-parallel-rpc-port") + 1
        arguments = [*rank["arguments"][:place], port, *rank["arguments"][place + 1 :]]
        rank |= {"url": local.url, "control": local.control, "telemetry": local.telemetry}
        rank |= {"arguments": arguments}
        del rank["devices"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    worker = ["--worker-cls", "benchmarks.support.cpu_rank_worker.CpuRankWorker"]
    worker += ["--additional-config", json.dumps({"step_log": str(logs / "rank")})]
    values |= {"model": str(model), "served_model_name": "moe", "instances": ranks}
    values["proxy"] = {**to_builtins(PATIENT), "port": here.proxy.port}
    values["proxy"]["admin_port"] = here.proxy.admin_port
    values["engine"] |= {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_blocks": 64,
        "enforce_eager": True,
        "side_channel_port": here.engine.side_channel_port,
        "arguments": [*values["engine"]["arguments"], *worker],
        "environment": {"PYTHONPATH": path},
    }
    return Deployment.from_values(values)


def generated(model: Path) -> list[int]:
    """What transformers generates."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        answer = network.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in answer[0, len(PROMPT) :]]


def ask(port: int) -> list[int]:
    """What a server generates."""
    body = {"model": "moe", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    with post(port, "/v1/completions", body) as response:
        return list(json.load(response)["choices"][0]["token_ids"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_pages_ranks_are_one_group_and_answer_as_one_model(tmp_path: Path) -> None:
    model = write_moe_model(tmp_path / "model")
    deployment = described(model, tmp_path)
    first, second = (tmp_path / "rank-0.csv", tmp_path / "rank-1.csv")
    expected = generated(model)
    with running(deployment, tmp_path) as ranks:
        assert ask(deployment.decode[0].port) == expected
        # The other rank computed its experts in every one of these steps.
        idle = read_steps(second)
        assert not idle.requests.any()
        assert len(idle.requests) >= TOKENS
        assert ask(deployment.decode[1].port) == expected
        assert read_steps(first).requests.sum() == read_steps(second).requests.sum() == TOKENS
        with served(ranks, tmp_path, migration=deployment.migration) as proxy:
            assert ask(proxy.deployment.proxy.port) == expected
