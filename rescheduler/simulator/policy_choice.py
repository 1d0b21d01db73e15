"""Which policies a simulation compares, as its configuration names them."""

from typing import Any, NamedTuple

__all__ = ["PolicyChoice", "policy_choices"]


class PolicyChoice(NamedTuple):
    """One policy of a simulation, before it is created.

    Attributes:
        label: what reports call it.
        name: it is registered under.
        options: of its constructor.
    """

    label: str
    name: str
    options: dict[str, Any]


def policy_choices(policies: str | list[str | dict[str, Any]]) -> list[PolicyChoice]:
    """Return the policies, each with a label of its own.

    Args:
        policies: names with commas between them; or a list of names and of
            ``{name, label, ...options}``.

    Raises:
        ValueError: none, one without a name, or two with one label.
    """
    given: list[str | dict[str, Any]]
    if isinstance(policies, str):
        given = list(filter(None, map(str.strip, policies.split(","))))
    else:
        given = policies
    choices: list[PolicyChoice] = []
    for i, entry in enumerate(given):
        options = {"name": entry} if isinstance(entry, str) else dict(entry)
        name = options.pop("name", None)
        label = options.pop("label", name)
        if not isinstance(name, str) or not isinstance(label, str):
            raise ValueError(f"policies.{i}: a policy's name, or {{name: ..., label: ...}}")
        if any(label == choice.label for choice in choices):
            raise ValueError(f"policies.{i}.label: there already is a policy {label!r}")
        choices.append(PolicyChoice(label, name, options))
    if not choices:
        raise ValueError("policies: at least one")
    return choices
