"""What has changed, from one version of vLLM to another, of all that Headway touches inside it.

    python -m benchmarks.vllm_symbols 0.32 0.33 [--diff]

Any two released versions: each is downloaded once. Comments and docstrings do not count. Most
changes matter to nobody; `python -m benchmarks.compatibility` says which do.
"""

import ast
import difflib
from pathlib import Path

from benchmarks.support.report import arguments
from benchmarks.support.vllm_versions import files_of, minor_version

NIXL = "distributed.kv_transfer.kv_connector.v1.nixl"
SYMBOLS = {
    "config.cache": "CacheConfig",
    "config.model": "ModelConfig.get_hidden_size ModelConfig.is_diffusion",
    "config.parallel": "ParallelConfig",
    "config.scheduler": "SchedulerConfig",
    "config.vllm": "VllmConfig.use_v2_model_runner VllmConfig.max_concurrent_batches",
    "distributed.kv_transfer.kv_connector.v1.base": "KVConnectorBase_V1",
    "distributed.nixl_utils": "NixlWrapper",
    f"{NIXL}.base_scheduler": "NixlBaseConnectorScheduler",
    f"{NIXL}.base_worker": "NixlBaseConnectorWorker",
    f"{NIXL}.connector": "NixlBaseConnector NixlPullConnector",
    f"{NIXL}.metadata": "NixlConnectorMetadata compute_nixl_compatibility_hash",
    f"{NIXL}.pull_scheduler": "NixlPullConnectorScheduler",
    f"{NIXL}.pull_worker": "NixlPullConnectorWorker",
    "entrypoints.launchers.api_server.entry": "main",
    "model_executor.layers.logits_processor": "LogitsProcessor",
    "model_executor.models.interfaces": "EagleModelMixin SupportsEagle3",
    "v1.core.block_pool": "BlockPool.free_blocks BlockPool.get_num_free_blocks BlockPool.touch",
    "v1.core.kv_cache_manager": "KVCacheManager.get_blocks KVCacheManager.usage",
    "v1.core.sched.async_scheduler": "AsyncScheduler",
    "v1.core.sched.interface": "PauseState",
    "v1.core.sched.output": "CachedRequestData NewRequestData SchedulerOutput",
    "v1.core.sched.request_queue": "FCFSRequestQueue",
    "v1.core.sched.scheduler": (
        "Scheduler.__init__ Scheduler._free_request Scheduler._reserve_prefill_lookahead "
        "Scheduler.finish_requests Scheduler.has_requests Scheduler.pause_state "
        "Scheduler.schedule Scheduler.shutdown Scheduler.update_from_output"
    ),
    "v1.engine": "EngineCoreOutput EngineCoreOutputs",
    "v1.engine.core": "EngineCore.step EngineCore.step_with_batch_queue",
    "v1.outputs": "AsyncModelRunnerOutput LogprobsLists ModelRunnerOutput KVConnectorOutput",
    "v1.request": "Request.__init__ Request.num_tokens RequestStatus",
    "v1.sample.ops.topk_topp_sampler": "TopKTopPSampler.forward_cpu",
    "v1.structured_output.backend_types": "StructuredOutputGrammar",
    "v1.structured_output.request": "StructuredOutputRequest",
    "v1.worker.cpu.model_runner": "CPUModelRunner",
    "v1.worker.cpu_worker": "CPUWorker",
    "v1.worker.gpu.input_batch": "InputBatch",
    "v1.worker.gpu.model_runner": (
        "ExecuteModelState GPUModelRunner.execute_model GPUModelRunner.sample_tokens"
    ),
    "v1.worker.gpu_input_batch": "CachedRequestState InputBatch.num_reqs InputBatch.req_ids",
    "v1.worker.gpu_model_runner": (
        "ExecuteModelState GPUModelRunner._update_states GPUModelRunner.execute_model "
        "GPUModelRunner.get_model GPUModelRunner.sample_tokens"
    ),
    "v1.worker.gpu_worker": (
        "Worker.compile_or_warm_up_model Worker.execute_model Worker.load_model "
        "Worker.sample_tokens Worker.shutdown"
    ),
}


def main() -> None:
    parser = arguments("what has changed of the parts of vLLM that Headway touches", quick=False)
    parser.add_argument("old", type=minor_version, help="a version, such as 0.32")
    parser.add_argument("new", type=minor_version, help="another one")
    parser.add_argument("--diff", action="store_true", help="show how")
    options = parser.parse_args()
    old, new = files_of(options.old), files_of(options.new)
    same = 0
    for module, names in SYMBOLS.items():
        for name in names.split():
            before, after = source_of(old, module, name), source_of(new, module, name)
            if before == after:
                same += 1
                continue
            gone = "" if after else " is gone"
            print(f"{module}.{name}{gone if before else ' is new'}")
            if options.diff:
                diff = difflib.unified_diff(before, after, options.old, options.new, lineterm="")
                print("\n".join(f"    {line}" for line in diff))
    print(f"{same} others are the same")


def source_of(vllm: Path, module: str, name: str) -> list[str]:
    """Return the lines of a class or a function as Python understands them; none if it is none."""
    path = vllm / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return []
    found: ast.AST | None = ast.parse(file.read_text())
    for part in name.split("."):
        body = getattr(found, "body", [])
        found = next((one for one in body if getattr(one, "name", None) == part), None)
    if found is None:
        return []
    for node in ast.walk(found):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(found).splitlines()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


if __name__ == "__main__":
    main()
