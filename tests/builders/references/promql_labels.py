"""Which labels the results of a PromQL query have, and whether the query asks for others."""

import promql_parser as promql


def result_labels(expression: promql.Expr, known: dict[str, set[str]]) -> set[str]:
    """The labels of an expression's results.

    Args:
        expression: without subqueries, `without`, `ignoring`, and `group_left` or `group_right`.
        known: the labels of each metric.

    Raises:
        AssertionError: it uses a metric, or a label of one, that does not exist.
    """
    match expression:
        case promql.NumberLiteral():
            return set()
        case promql.ParenExpr():
            return result_labels(expression.expr, known)
        case promql.MatrixSelector():
            return result_labels(expression.vector_selector, known)
        case promql.VectorSelector():
            assert expression.name in known, f"no metric {expression.name}"
            labels = known[expression.name]
            _have(labels, [one.name for one in expression.matchers.matchers], expression)
            return labels
        case promql.AggregateExpr():
            inner, modifier = result_labels(expression.expr, known), expression.modifier
            assert modifier is None or modifier.type == promql.AggModifierType.By
            by = modifier.labels if modifier else []
            _have(inner, by, expression)
            return set(by)
        case promql.Call():
            labels = set().union(*(result_labels(one, known) for one in expression.args))
            if expression.func.name == "histogram_quantile":
                _have(labels, ["le"], expression)
                return labels - {"le"}
            return labels
        case promql.BinaryExpr():
            return _of_both(expression, known)
    raise AssertionError(f"not expected in a query: {expression.prettify()}")


def _of_both(binary: promql.BinaryExpr, known: dict[str, set[str]]) -> set[str]:
    left, right = result_labels(binary.lhs, known), result_labels(binary.rhs, known)
    matching = binary.modifier.matching if binary.modifier else None
    if matching is not None:
        assert matching.type == promql.LabelModifierType.Include
        _have(left & right, matching.labels, binary)
    elif not (_is_number(binary.lhs) or _is_number(binary.rhs)):
        assert left == right, f"never match: {binary.prettify()}"
    return left or right


def _is_number(expression: promql.Expr) -> bool:
    return isinstance(expression, promql.NumberLiteral)


def _have(labels: set[str], asked: list[str], of: promql.Expr) -> None:
    assert labels >= set(asked), f"no label {set(asked) - labels} in {of.prettify()}"
