"""How far a batch is, and when it is expected to end."""

import sys
import time
from collections import deque
from math import sqrt
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rescheduler.batch.batch_files import Answer, BatchRequest

_NORMAL_80 = 1.2816
"""Standard deviations to either side that hold 80% of a normal distribution."""

_FEWEST, _MOST_RECENT = 5, 512
_LOG_SECONDS, _DRAW_SECONDS = 30.0, 0.5
_LATEST = 365 * 86400.0
"""Seconds; what is expected to end later is not said."""


class Finish(NamedTuple):
    """Seconds until a batch ends: expected, and the bounds of the 80% interval."""

    expected: float
    soonest: float
    latest: float


class Pace:
    r"""Expects when a batch ends, by the answers so far.

    Of n answers with m tokens each in the mean and a standard deviation of s, and r requests
    without one, the tokens that remain and their rate are

    .. math:: W = r m, \qquad \rho = \frac{1}{t} \sum_{j=1}^{k} l_j

    with the lengths l of the last k answers, which came within t seconds until now. So the batch
    ends in :math:`T = W / \rho` seconds, of which

    .. math::
        \frac{\sigma_T^2}{T^2} = \frac{s^2}{m^2}\Big(\frac1r + \frac1n\Big)
        + \frac1k\Big(1 + \frac{s^2}{m^2}\Big)

    The first term is what remains: r lengths, and their mean estimated from n. The second is the
    rate: k answers that end at random times. The interval is :math:`T \pm 1.28\,\sigma_T`. It does
    not know how online traffic will change, and takes the first answers to be like the others,
    though short ones are served first.

    Nothing here has a clock: the caller says what time it is, in seconds.

    Args:
        requests: of the whole batch.
        earlier: tokens of the answers that earlier runs have got.
        now: the time.
    """

    def __init__(self, requests: int, earlier: list[int], now: float) -> None:
        self._requests, self._began = requests, now
        self._answers = 0
        self._sum = 0
        self._squares = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_MOST_RECENT)
        self._recent_sum = 0
        for tokens in earlier:
            self._count(tokens)

    def answered(self, tokens: int, now: float) -> None:
        """Note an answer of so many tokens."""
        self._count(tokens)
        if len(self._recent) == _MOST_RECENT:
            self._began, dropped = self._recent[0]
            self._recent_sum -= dropped
        self._recent.append((now, tokens))
        self._recent_sum += tokens

    def finish(self, done: int, now: float) -> Finish | None:
        """Return when it ends once so many requests are done, or None while too few are."""
        left, rate = self._requests - done, self.rate(now)
        if len(self._recent) < _FEWEST or rate <= 0.0 or self._sum == 0:
            return None
        if left <= 0:
            return Finish(0.0, 0.0, 0.0)
        n, k = self._answers, len(self._recent)
        variance = max(0.0, (self._squares - self._sum**2 / n) / max(1, n - 1))
        relative = variance / (self._sum / n) ** 2
        spread = sqrt(relative * (1 / left + 1 / n) + (1 + relative) / k)
        expected = left * self._sum / n / rate
        half = _NORMAL_80 * spread * expected
        return Finish(expected, max(0.0, expected - half), expected + half)

    def rate(self, now: float) -> float:
        """Return how many tokens a second have come lately."""
        return self._recent_sum / max(1e-9, now - self._began)

    def _count(self, tokens: int) -> None:
        self._answers += 1
        self._sum += tokens
        self._squares += tokens * tokens


class BatchProgress:
    """Shows one line on a terminal, and else writes one to standard error now and then.

    Args:
        requests: of the whole batch.
        done: of them, already answered.
        earlier: tokens of those answers.
    """

    def __init__(self, requests: int, done: int, earlier: list[int]) -> None:
        self._requests = requests
        self._done = done
        self._failed = 0
        self._pace = Pace(requests, earlier, time.monotonic())
        self._trouble = ""
        self._said = time.monotonic()
        self._live: Live | None = None
        if sys.stderr.isatty():
            console = Console(stderr=True)
            self._live = Live(
                console=console,
                get_renderable=self._line,
                refresh_per_second=1 / _DRAW_SECONDS,
                transient=True,
            )

    def __enter__(self) -> "BatchProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def answered(self, tokens: int | None) -> None:
        """Note an answer of so many tokens, or an error, which is final."""
        self._done += 1
        self._trouble = ""
        if tokens is None:
            self._failed += 1
        else:
            self._pace.answered(tokens, time.monotonic())
        self.tell()

    def retrying(self, why: str) -> None:
        """Note why a request has to be sent again."""
        self._trouble = why
        self.tell()

    def tell(self) -> None:
        """Write a line where there is no terminal, if it is time."""
        if self._live is None and time.monotonic() - self._said >= _LOG_SECONDS:
            self._said = time.monotonic()
            print(self._line().plain, file=sys.stderr, flush=True)

    def _line(self) -> Text:
        now = time.monotonic()
        parts = [f"{self._done:,} of {self._requests:,} answered"]
        if self._failed:
            parts.append(f"{self._failed:,} errors")
        finish = self._pace.finish(self._done, now)
        if finish is not None and finish.latest < _LATEST:
            parts += [f"{self._pace.rate(now):,.0f} tokens/s", _when(finish)]
        if self._trouble:
            parts.append(f"sending again: {self._trouble}")
        return Text(", ".join(parts))


def _when(finish: Finish) -> str:
    """Return when it is expected to end, on the clock, and in how many minutes."""
    clock = time.strftime("%H:%M", time.localtime(time.time() + finish.expected))
    expected, soonest, latest = map(_span, finish)
    return f"done at {clock}, in {expected} ({soonest} to {latest}, 80%)"


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole / 3600:.1f} h"


MOST_REFUSALS = 5
"""Refusals in a row, of requests to an endpoint and a model, after which no more are sent there."""

_OF_CLIENTS = (401, 402, 407)
"""No change to a request would mend these."""
_OF_ADDRESSES = (403, 404, 405, 410, 421, 426)
"""The key, the model or the address may be wrong; or the request."""


class Refusal(NamedTuple):
    """A request and how it was refused."""

    request: BatchRequest
    answer: Answer


def is_of_the_server(answer: Answer) -> bool:
    """Return whether an answer may say more of the key, the model or the address."""
    return answer.status_code in (*_OF_CLIENTS, *_OF_ADDRESSES)


class Refusals:
    """Holds refusals back until it is known whose fault they are.

    Once the server answers a request to the same endpoint and model, 403, 404 and the like are
    the requests' own. After five in a row the endpoint and model are closed: what was refused has
    no answer, and nothing else is sent there. A wrong key is never a request's own fault.

    Args:
        targets: endpoints and models, by their numbers, of all requests that are to be sent.
    """

    def __init__(self, targets: set[int]) -> None:
        self._targets = targets
        self._held: dict[int, list[Refusal]] = {}
        self._closed: set[int] = set()
        self.last: Refusal | None = None

    @property
    def all_closed(self) -> bool:
        """Whether nothing is left to send."""
        return bool(self._closed) and self._closed >= self._targets

    def is_closed(self, target: int) -> bool:
        """Return whether nothing more is to be sent to an endpoint and model."""
        return target in self._closed

    def hold(self, refusal: Refusal) -> None:
        """Note a refusal, for which `is_of_the_server` holds."""
        target = refusal.request.target
        held = self._held.setdefault(target, [])
        held.append(refusal)
        if len(held) >= MOST_REFUSALS:
            self._closed.add(target)
            self.last = refusal

    def answered(self, target: int) -> list[Refusal]:
        """Return the refusals that are final, now that the server has answered a request."""
        if target in self._closed:
            return []
        return self._final(target)

    def rest(self) -> list[Refusal]:
        """Return the refusals that are final at the end: all were sent, and none was closed."""
        if self._closed:
            return []
        return [refusal for target in list(self._held) for refusal in self._final(target)]

    def _final(self, target: int) -> list[Refusal]:
        held = self._held.pop(target, [])
        for refusal in held:
            if refusal.answer.status_code in _OF_CLIENTS:
                self.last = refusal
        return [refusal for refusal in held if refusal.answer.status_code not in _OF_CLIENTS]
