"""How long one batch of forecasts takes, on a CPU core or a GPU.

    python -m benchmarks.predictor_latency [--device cuda] [--quick] --json OUT

The survival model and STAR's regressor for d = 3,584 (DeepSeek-R1-Distill-Qwen-7B), from
tensors on the device to tensors on the device, at batch 1, 10, 64 and 256. STAR reports 1.33 ms
and 2.4 ms at 1 and 10 for its regressor (Table 1). On a GPU both run as CUDA graphs, as in the
engine. Weights and inputs are random: only time is measured.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.report import arguments, report
from predictor.forecasts.survival_grid import survival_edges
from predictor.models.hidden_state_mlp import HiddenStateMLP, RequestRows
from predictor.models.remaining_length_mlp import RemainingLengthMLP
from predictor.models.survival_mlp import SurvivalMLP

BATCHES = (1, 10, 64, 256)
D = 3584
CONTEXT = 32_768


def main() -> None:
    """Time both models at every batch size."""
    parser = arguments("how long one batch of forecasts takes")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shared: dict[str, Any] = {"model": "", "model_revision": "", "hidden_size": D, "k": 20}
    models: dict[str, HiddenStateMLP] = {
        "survival": SurvivalMLP(
            edges=survival_edges(CONTEXT).tolist(),
            widths=(512, 128),
            inputs=("generated_tokens", "prompt_tokens"),
            **shared,
        ),
        "regressor": RemainingLengthMLP(**shared),
    }
    figures: dict[str, float] = {}
    for name, model in models.items():
        model.eval().to(device).requires_grad_(False)
        for batch in BATCHES:
            rows = RequestRows(
                torch.randn(batch, D, device=device), torch.rand(batch, 3, device=device) * 1000
            )
            figures[f"{name}_ms_batch{batch}"] = _median_ms(
                _predictor(model, rows, device), device, 20 if options.quick else 300
            )
    report("predictor_latency", figures, options.json)


def _predictor(
    model: HiddenStateMLP, rows: RequestRows, device: torch.device
) -> Callable[[], object]:
    def predict() -> torch.Tensor:
        with torch.inference_mode():
            return model.survival(rows) if isinstance(model, SurvivalMLP) else model(rows)

    if device.type != "cuda":
        return predict
    predict()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        predict()
    return graph.replay


def _median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 5):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times[5:])) * 1e3


if __name__ == "__main__":
    main()
