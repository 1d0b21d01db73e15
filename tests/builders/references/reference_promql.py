"""PromQL of instant queries, evaluated plainly: as much of it as the alert rules use.

Source: the documentation of Prometheus on querying, functions and staleness. `promtool` judges the
same rules by the same cases where it is installed.
"""

import math
import operator
import re
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import promql_parser as promql

__all__ = ["Labels", "Series", "Vector", "evaluate"]

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Series = dict[Labels, list[tuple[float, float | None]]]
"""Samples of each series in order of time, in seconds; None ends a series (it is stale)."""

_LOOKBACK = 300.0
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.nan,
}
_AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
    "avg": lambda values: math.fsum(values) / len(values),
}


def evaluate(expression: promql.Expr, series: Series, now: float) -> Vector | float:
    """The value of an expression at a time.

    Raises:
        NotImplementedError: the expression uses what is not known here.
    """
    match expression:
        case promql.NumberLiteral():
            return expression.val
        case promql.ParenExpr():
            return evaluate(expression.expr, series, now)
        case promql.VectorSelector():
            return _instant(expression, series, now)
        case promql.AggregateExpr():
            return _aggregate(expression, series, now)
        case promql.BinaryExpr():
            return _binary(expression, series, now)
        case promql.Call():
            return _call(expression, series, now)
    raise NotImplementedError(f"{type(expression).__name__}: {expression.prettify()}")


def _vector(expression: promql.Expr, series: Series, now: float) -> Vector:
    value = evaluate(expression, series, now)
    assert isinstance(value, dict), expression.prettify()
    return value


def _selected(selector: promql.VectorSelector, series: Series) -> Series:
    return {labels: samples for labels, samples in series.items() if _matches(selector, labels)}


def _matches(selector: promql.VectorSelector, labels: Labels) -> bool:
    values = dict(labels)
    if selector.name is not None and values["__name__"] != selector.name:
        return False
    return all(_holds(one, values.get(one.name, "")) for one in selector.matchers.matchers)


def _holds(matcher: promql.Matcher, value: str) -> bool:
    if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        return (matcher.value == value) == (matcher.op == promql.MatchOp.Equal)
    fits = re.fullmatch(matcher.value, value) is not None
    return fits == (matcher.op == promql.MatchOp.Re)


def _instant(selector: promql.VectorSelector, series: Series, now: float) -> Vector:
    at = now - _seconds(selector.offset)
    found: Vector = {}
    for labels, samples in _selected(selector, series).items():
        last = next(((t, v) for t, v in reversed(samples) if t <= at), None)
        if last is not None and last[1] is not None and at - last[0] < _LOOKBACK:
            found[labels] = last[1]
    return found


def _call(call: promql.Call, series: Series, now: float) -> Vector:
    name = call.func.name
    if name == "histogram_quantile":
        quantile, buckets = call.args
        return _histogram_quantile(quantile.val, _vector(buckets, series, now))
    (matrix,) = call.args
    selector, length = matrix.vector_selector, matrix.range.total_seconds()
    end = now - _seconds(selector.offset)
    found: Vector = {}
    for labels, samples in _selected(selector, series).items():
        within = [(t, v) for t, v in samples if end - length < t <= end and v is not None]
        value = _over_time(name, within, length, end)
        if value is not None:
            found[labels if name == "last_over_time" else _unnamed(labels)] = value
    return found


def _over_time(
    name: str, samples: list[tuple[float, float]], length: float, end: float
) -> float | None:
    """The value of a function of a range; None if the range has too few samples."""
    values = [value for _, value in samples]
    if not values:
        return None
    match name:
        case "avg_over_time":
            return math.fsum(values) / len(values)
        case "last_over_time":
            return values[-1]
        case "changes":
            return float(sum(a != b for a, b in pairwise(values)))
        case "increase":
            return _increase(samples, length, end)
        case "rate":
            increase = _increase(samples, length, end)
            return None if increase is None else increase / length
    raise NotImplementedError(name)


def _increase(samples: list[tuple[float, float]], length: float, end: float) -> float | None:
    """The increase of a counter, extrapolated to the ends of the range, by half a step at most."""
    if len(samples) < 2:
        return None
    steps = list(pairwise(samples))
    increase = math.fsum(new - old if new >= old else new for (_, old), (_, new) in steps)
    (first, before), (last, _) = samples[0], samples[-1]
    covered = last - first
    step = covered / len(steps)
    ahead, behind = first - (end - length), end - last
    if increase > 0 and before >= 0:
        ahead = min(ahead, covered * before / increase)  # a counter begins at 0
    ahead, behind = (one if one < 1.1 * step else step / 2 for one in (ahead, behind))
    return increase * (covered + ahead + behind) / covered


def _histogram_quantile(quantile: float, buckets: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(_without(labels, {"le", "__name__"}), []).append((bound, count))
    found: Vector = {}
    for labels, group in groups.items():
        counts = sorted(group)
        rank, lower, below = quantile * counts[-1][1], 0.0, 0.0
        for bound, count in counts:
            if count >= rank:
                share = (rank - below) / (count - below) if count > below else 0.0
                found[labels] = lower if math.isinf(bound) else lower + (bound - lower) * share
                break
            lower, below = bound, count
    return found


def _aggregate(aggregation: promql.AggregateExpr, series: Series, now: float) -> Vector:
    modifier = aggregation.modifier
    assert modifier is None or modifier.type == promql.AggModifierType.By, "without"
    kept = set(modifier.labels) if modifier else set()
    groups: dict[Labels, list[float]] = {}
    for labels, value in _vector(aggregation.expr, series, now).items():
        groups.setdefault(_only(labels, kept), []).append(value)
    combine = _AGGREGATIONS[str(aggregation.op)]
    return {labels: combine(values) for labels, values in groups.items()}


def _binary(binary: promql.BinaryExpr, series: Series, now: float) -> Vector | float:
    sign = str(binary.op)
    left, right = evaluate(binary.lhs, series, now), evaluate(binary.rhs, series, now)
    if sign in ("and", "or", "unless"):
        assert isinstance(left, dict) and isinstance(right, dict)
        return _set_operation(sign, left, right, _key(binary))
    if isinstance(left, dict) and isinstance(right, dict):
        return _matched(sign, left, right, _key(binary))
    if isinstance(left, dict):
        pairs = {labels: (value, right) for labels, value in left.items()}
    elif isinstance(right, dict):
        pairs = {labels: (left, value) for labels, value in right.items()}
    else:
        return _ARITHMETIC[sign](left, right)
    return _computed(sign, pairs, vector_first=isinstance(left, dict))


def _key(binary: promql.BinaryExpr) -> Callable[[Labels], Labels]:
    """By which labels the two sides of an operator are matched."""
    matching = binary.modifier.matching if binary.modifier else None
    if matching is None:
        return _unnamed
    assert matching.type == promql.LabelModifierType.Include, "ignoring"
    labels = set(matching.labels)
    return lambda of: _only(of, labels)


def _set_operation(
    sign: str, left: Vector, right: Vector, key: Callable[[Labels], Labels]
) -> Vector:
    on_right, on_left = set(map(key, right)), set(map(key, left))
    if sign == "or":
        return {**left, **{k: v for k, v in right.items() if key(k) not in on_left}}
    return {k: v for k, v in left.items() if (key(k) in on_right) == (sign == "and")}


def _matched(sign: str, left: Vector, right: Vector, key: Callable[[Labels], Labels]) -> Vector:
    others = {key(labels): value for labels, value in right.items()}
    assert len(others) == len(right), "many to many"
    pairs = {k: (v, others[key(k)]) for k, v in left.items() if key(k) in others}
    return _computed(sign, pairs, vector_first=True)


def _computed(sign: str, pairs: dict[Labels, tuple[float, float]], vector_first: bool) -> Vector:
    if sign in _COMPARISONS:
        holds = _COMPARISONS[sign]
        return {k: (a if vector_first else b) for k, (a, b) in pairs.items() if holds(a, b)}
    return {_unnamed(k): _ARITHMETIC[sign](a, b) for k, (a, b) in pairs.items()}


def _seconds(offset: timedelta | None) -> float:
    return offset.total_seconds() if offset else 0.0


def _only(labels: Labels, names: set[str]) -> Labels:
    return frozenset(pair for pair in labels if pair[0] in names)


def _without(labels: Labels, names: set[str]) -> Labels:
    return frozenset(pair for pair in labels if pair[0] not in names)


def _unnamed(labels: Labels) -> Labels:
    return _without(labels, {"__name__"})
