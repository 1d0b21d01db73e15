"""Which instances have which models, and who competes for them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from rescheduler.placement.account import Account
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Placements, R

Instances = frozenset[InstanceState]


class ModelPlaces:
    """The models of a deployment's instances, as adapters come and go."""

    def __init__(self, prefills: Sequence[InstanceState], decodes: Sequence[InstanceState]) -> None:
        self._instances, self._decodes = (*prefills, *decodes), decodes
        self._listed: list[frozenset[str] | None] = []
        self._components: list[Instances] = []

    def connected(self, model: str) -> Instances:
        """Return the instances for which requests for a model compete, with whom these compete too.

        Two are connected if they have a model in common, prefill instances among them. No instance
        stands for all of them, as where one has not listed its models. A name that none has goes
        with the first that are connected.
        """
        listed = [one.models for one in self._instances]
        if listed != self._listed:
            self._listed, self._components = listed, self._found_components()
        if len(self._components) < 2:
            return frozenset()
        chosen = (one for one in self._components if any(each.serves(model) for each in one))
        return next(chosen, self._components[0])

    def _found_components(self) -> list[Instances]:
        components: list[Instances] = []
        models: list[frozenset[str]] = []
        for instance in self._instances:
            if instance.models is None:
                return []
            joined, names = frozenset({instance}), instance.models
            for k in reversed(range(len(components))):
                if models[k] & instance.models:
                    joined, names = joined | components.pop(k), names | models.pop(k)
            components.append(joined)
            models.append(names)
        return components

    def lacking(self, model: str) -> Instances:
        """Return the decode instances without a model; none where no instance is known to have it.

        Then whichever is asked says what it thinks of the name.
        """
        lacking = frozenset(one for one in self._decodes if not one.serves(model))
        return lacking if len(lacking) < len(self._decodes) else frozenset()

    def lacking_of(self, requests: Iterable[R]) -> dict[str, Instances]:
        """Return the decode instances without each of the models of requests."""
        return {model: self.lacking(model) for model in {one.model for one in requests}}

    def usable_for(
        self, lacking: Instances, usable: Sequence[InstanceState]
    ) -> Sequence[InstanceState]:
        """Return those of usable instances that have a model.

        One that drains takes requests while no other instance in service has it.
        """
        if not lacking:
            return usable
        having = [one for one in usable if one not in lacking]
        return having or [one for one in self._decodes if one.breaker.closed and one not in lacking]

    def rivals(self, waiting: Sequence[R]) -> dict[Instances, dict[Account, R]]:
        """Return a waiting request of each account, by the instances to which none of its can go.

        Those of an entry compete for the same instances; there are none where all can go anywhere.
        """
        lacking = self.lacking_of(waiting)
        rivals: dict[Instances, dict[Account, R]] = {}
        if any(lacking.values()):
            nowhere: dict[Account, Instances] = {}
            for one in waiting:
                without = lacking[one.model]
                nowhere[one.account] = nowhere.get(one.account, without) & without
            for one in waiting:
                rivals.setdefault(nowhere[one.account], {})[one.account] = one
        return rivals

    def joined(
        self, rivals: Mapping[Instances, Mapping[Account, R]], instance: InstanceState
    ) -> list[dict[Account, R]]:
        """Return those of rivals of which none can go to an instance, a request of each account.

        Where what two of them can go to overlaps, directly or by way of others, they are one.
        """
        groups: list[tuple[Instances, dict[Account, R]]] = []
        for without, alike in rivals.items():
            if instance in without:
                places, joined = frozenset(self._decodes) - without, dict(alike)
                for other in [one for one in groups if one[0] & places]:
                    groups.remove(other)
                    places, joined = places | other[0], {**other[1], **joined}
                groups.append((places, joined))
        return [joined for _, joined in groups]

    @property
    def differ(self) -> bool:
        """Whether some decode instances have models that others lack, as far as is known."""
        return len({one.models for one in self._decodes}) > 1

    def idle(self, prefilled: Collection[R], running: Placements[R]) -> list[InstanceState]:
        """Return the decode instances with room for more than the prefilled requests may take.

        Args:
            prefilled: requests that are prefilled, or are about to be.
            running: what has a place already.
        """
        idle = []
        for one in self._decodes:
            on, coming = running.on(one), [each for each in prefilled if one.serves(each.model)]
            room = one.kv_capacity - sum(each.context_tokens for each in (*on, *coming))
            if one.available and one.slots - len(on) > len(coming) and room > 0:
                idle.append(one)
        return idle

    def rooms_ahead(
        self, lacking: Iterable[Instances], prefilled: Iterable[R], ahead: int
    ) -> dict[Instances, int]:
        """Return how many more may be prefilled of requests that instances lack the model of.

        Of all that can go to the same instances, or to some of these, as large a part of what is
        prefilled ahead as these have of the slots, and one at least. What can go to some instances
        only has a part in common, too.
        """
        counts = Counter(self.lacking(one.model) for one in prefilled)
        slots = sum(one.slots for one in self._decodes)
        some = [one for one in {*lacking, *counts} if one]
        common = frozenset.intersection(*some) if some else frozenset()
        rooms = {}
        for without in {*lacking, *some, common}:
            share = ahead * (slots - sum(one.slots for one in without)) // max(slots, 1)
            within = sum(n for one, n in counts.items() if without <= one)
            rooms[without] = max(share, 1) - within
        return rooms
