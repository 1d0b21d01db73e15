"""A length whose logarithm is normal: what earlier lengths say of the next one."""

from math import erf, erfc, exp, inf, log, pi, sqrt
from typing import NamedTuple

LONGEST = 10_000_000
"""Tokens above which no length is told apart."""

_FAR = 25.0
"""Standard deviations from which the tail is its asymptote: erfc underflows at 38."""


class LogNormal(NamedTuple):
    """The law of a length X, in tokens.

    Attributes:
        mean: of ln X.
        spread: standard deviation of ln X, above 0.
    """

    mean: float
    spread: float

    def above(self, tokens: float) -> float:
        r"""Return P(X > t), which is 1 at t = 0.

        .. math:: S(t) = \Phi\Big(\frac{\mu - \ln t}{\sigma}\Big)
        """
        if tokens <= 0:
            return 1.0
        return 0.5 * erfc((log(tokens) - self.mean) / (self.spread * sqrt(2)))

    def expected(self, most: float = inf) -> float:
        r"""Return the mean in tokens once the length is cut, at least 1.

        .. math:: E[\min(X, c)] = e^{\mu + \sigma^2/2}\,
            \Phi\Big(\frac{\ln c - \mu - \sigma^2}{\sigma}\Big) + c\,S(c)

        Args:
            most: c, the request's ``max_tokens``; `LONGEST` when it is larger.
        """
        most = min(max(most, 1.0), float(LONGEST))
        z = (log(most) - self.mean) / self.spread - self.spread
        whole = exp(self.mean + self.spread**2 / 2)
        return min(max(1.0, whole * 0.5 * (1 + erf(z / sqrt(2))) + most * self.above(most)), most)

    def beyond(self, tokens: float) -> tuple[float, float]:
        r"""Return what is expected of a length that was cut after c tokens.

        .. math:: E[\ln X \mid X > c] = \mu + \sigma\lambda, \qquad
            E[(\ln X - \mu)^2 \mid X > c] = \sigma^2 (1 + z\lambda)

        with :math:`z = (\ln c - \mu) / \sigma` and :math:`\lambda = \varphi(z) / (1 - \Phi(z))`.

        Args:
            tokens: c, at least 1.
        """
        z = (log(max(tokens, 1.0)) - self.mean) / self.spread
        if z > _FAR:
            hazard = z + 1 / z
        else:
            hazard = exp(-z * z / 2) / sqrt(2 * pi) / (0.5 * erfc(z / sqrt(2)))
        return self.mean + self.spread * hazard, self.spread**2 * (1 + z * hazard)
