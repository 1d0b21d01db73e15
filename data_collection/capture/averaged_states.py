"""The states of a request averaged over its tokens, on the engine's device."""

from collections.abc import Sequence

import torch

_AT_ONCE = 256
"""Tokens of a replay that are averaged in one product."""


class AveragedStates:
    r"""Averages in which a token counts half as much after some more.

    .. math:: \bar h_n = \sum_{j \le n} a^{n - j} h_j \Big/ \sum_{j \le n} a^{n - j},
        \qquad a = 2^{-1 / H}

    j runs over the tokens whose states were computed here, from the end of prefill on: j = 0 is the
    prompt's last token. A preempted request goes on with its average. One that has moved to another
    engine starts anew there. They are kept in float32, [requests, d], and more as need be.

    Args:
        half_life: H, in tokens; above 0.
        width: d.
        device: the engine's.
        requests: how many are expected to run at a time.
    """

    def __init__(self, half_life: float, width: int, device: torch.device, requests: int) -> None:
        self._decay = 2.0 ** (-1.0 / half_life)
        self._averages = torch.zeros(requests, width, device=device)
        self._free = list(range(requests))
        self._places: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    def add(self, request_ids: Sequence[str], states: torch.Tensor) -> None:
        """Take the newest token's state of some requests, [n, d]."""
        weights = []
        for name in request_ids:
            self._weights[name] = weight = self._decay * self._weights.get(name, 0.0) + 1.0
            weights.append(weight)
        places = self._of(request_ids)
        share = on_device([1.0 / weight for weight in weights], self._averages.device)[:, None]
        before, new = self._averages.index_select(0, places), states.float()
        after = torch.where(share == 1.0, new, torch.lerp(before, new, share))
        self._averages.index_copy_(0, places, after)

    def extend(self, request_id: str, states: torch.Tensor) -> torch.Tensor:
        """Take the states of consecutive tokens, [n, d], and return the average at each, [n, d]."""
        return torch.cat([self._extend(request_id, part) for part in torch.split(states, _AT_ONCE)])

    def _extend(self, request_id: str, states: torch.Tensor) -> torch.Tensor:
        n, before = len(states), self._weights.get(request_id, 0.0)
        ages = torch.arange(n, device=states.device)
        behind = (ages[:, None] - ages).float()
        shares = torch.where(behind >= 0, self._decay ** behind.clamp_min(0), 0.0)
        earlier = before * self._decay ** (ages + 1).float()
        weights = shares.sum(dim=1) + earlier
        place = self._of([request_id])
        averages = shares @ states.float()
        if before:
            averages += earlier[:, None] * self._averages.index_select(0, place)
        averages /= weights[:, None]
        self._averages.index_copy_(0, place, averages[-1:])
        self._weights[request_id] = self._decay**n * before + (1 - self._decay**n) / (
            1 - self._decay
        )
        return averages

    def read(self, request_ids: Sequence[str]) -> torch.Tensor:
        """Return a copy of the averages of requests that have been added, [n, d]."""
        return self._averages.index_select(0, self._of(request_ids))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop requests that have ended."""
        for name in request_ids:
            place = self._places.pop(name, None)
            if place is not None:
                self._free.append(place)
                del self._weights[name]

    def _of(self, request_ids: Sequence[str]) -> torch.Tensor:
        """Return where requests are, [n]; new ones get a place."""
        for name in request_ids:
            if name not in self._places:
                if not self._free:
                    n = len(self._averages)
                    self._free = list(range(n, 2 * n))
                    self._averages = torch.cat([self._averages, torch.zeros_like(self._averages)])
                self._places[name] = self._free.pop()
        return on_device([self._places[name] for name in request_ids], self._averages.device)


def on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return numbers on a device, without waiting for a GPU."""
    on_gpu = device.type == "cuda"
    return torch.tensor(values, pin_memory=on_gpu).to(device, non_blocking=True)
