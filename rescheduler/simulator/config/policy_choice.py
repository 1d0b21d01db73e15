"""Which policies and planners a simulation compares, as its configuration names them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["CandidateChoice", "PolicyChoice", "candidate_choices", "policy_choices"]


class PolicyChoice(NamedTuple):
    """One routing policy or migration planner of a simulation, before it is created.

    Attributes:
        label: what reports call it.
        name: it is registered under.
        options: of its constructor.
    """

    label: str
    name: str
    options: dict[str, Any]

    @property
    def plain(self) -> dict[str, Any]:
        """The choice as a configuration has it."""
        return {"name": self.name, "label": self.label, **self.options}


class CandidateChoice(NamedTuple):
    """What a simulation compares with others: a routing policy and a migration planner.

    Attributes:
        label: of the two.
        policy: places requests.
        planner: moves them.
    """

    label: str
    policy: PolicyChoice
    planner: PolicyChoice


def policy_choices(
    policies: str | list[str | dict[str, Any]], key: str = "policies"
) -> list[PolicyChoice]:
    """Return the policies, each with a label of its own.

    Args:
        policies: names with commas between them; or a list of names and of
            ``{name, label, ...options}``.
        key: of the configuration, for errors.

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
            raise ValueError(f"{key}.{i}: a policy's name, or {{name: ..., label: ...}}")
        if any(label == choice.label for choice in choices):
            raise ValueError(f"{key}.{i}.label: there already is a policy {label!r}")
        choices.append(PolicyChoice(label, name, options))
    if not choices:
        raise ValueError(f"{key}: at least one")
    return choices


def candidate_choices(
    policies: Sequence[PolicyChoice], planners: Sequence[PolicyChoice]
) -> list[CandidateChoice]:
    """Return every policy with every planner, named after that of the two which varies."""
    found = []
    for policy in policies:
        for planner in planners:
            label = f"{policy.label}, {planner.label}"
            if len(planners) == 1:
                label = policy.label
            elif len(policies) == 1:
                label = planner.label
            found.append(CandidateChoice(label, policy, planner))
    return found
