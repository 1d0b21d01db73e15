"""Record with vLLM's offline engine in a process of its own, as a small command.

usage: record_offline.py MODEL DATASET ENGINE_ARGUMENTS.json PROMPTS.json MAX_TOKENS
Prints vLLM's counters as the last line, in JSON.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    from data_collection.workload.engine_options import engine_arguments

    model, dataset, arguments, prompts, max_tokens = sys.argv[1:]
    capture = {"headway": {"k": 1, "record": {"path": dataset, "dtype": "float32"}}}
    statistics = {"disable_log_stats": False}
    options = engine_arguments(model, capture, json.loads(arguments) | statistics)
    engine = LLM(**options)
    token_ids = json.loads(Path(prompts).read_text())
    engine.generate(
        [{"prompt_token_ids": ids} for ids in token_ids],
        SamplingParams(temperature=0.0, max_tokens=int(max_tokens), detokenize=False),
        use_tqdm=False,
    )
    counters = {
        metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")
    }
    engine.llm_engine.engine_core.shutdown()
    print(json.dumps(counters))


if __name__ == "__main__":
    main()
