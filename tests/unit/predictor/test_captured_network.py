"""On a GPU the network runs in a CUDA graph: nothing may come from the host while it does."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from predictor import RequestRows, SurvivalMLP, load_predictor

SHIPPED = Path(__file__).parents[3] / "checkpoints/smollm2-135m-instruct"


class NothingFromPython(TorchDispatchMode):
    """Refuses tensors made of Python objects, whose values a GPU would copy from the host.

    Every tensor that an operation uses must be known before, or the result of another one.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor): tensor for tensor in known}  # kept, so that no id is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self.known:
                raise AssertionError(f"{func} uses values from the host: {tensor}")
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.known[id(tensor)] = tensor
        return result


def test_the_shipped_predictor_needs_nothing_of_the_host() -> None:
    predictor = load_predictor(str(SHIPPED))
    assert isinstance(predictor, SurvivalMLP) and predictor.inputs, "which index the counts"
    rows = RequestRows(torch.randn(4, predictor.hidden_size), torch.full((4, 6), 7.0))
    on_device = [rows.hidden_states, rows.numbers, *predictor.parameters(), *predictor.buffers()]
    with torch.no_grad():
        expected = predictor.survival(rows)
        with NothingFromPython(on_device):
            curves = predictor.survival(rows)
    torch.testing.assert_close(curves, expected, rtol=0, atol=0)
