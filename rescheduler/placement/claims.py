"""Who has no claim to a place that another request gets, since it could not have had it."""

from collections import Counter
from collections.abc import Collection
from typing import Generic

from rescheduler.placement.account import Account
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.model_places import Instances, ModelPlaces
from rescheduler.placement.placeable import R


class Claims(Generic[R]):
    """The clients that wait while others are placed, in one round of decisions.

    One has no claim to a place where none of its requests can go: the instance has the model of
    none, all of them have to be prefilled first, or all that wait have been passed over since they
    fit nowhere. Otherwise it would save up claims, for which all others stand still later.

    Args:
        for_decode: requests that wait for a place to decode.
        for_prefill: those that have to be prefilled before.
        may_prefill: more may be prefilled: what waits for that does not wait for others to go.
    """

    def __init__(
        self,
        accounts: Accounts,
        models: ModelPlaces,
        for_decode: Collection[R],
        for_prefill: Collection[R],
        may_prefill: bool,
    ) -> None:
        self._accounts, self._models = accounts, models
        self._for_decode, self._for_prefill = for_decode, for_prefill
        self._may_prefill = may_prefill
        self._known = False
        self._rivals: dict[Instances, dict[Account, R]] = {}
        self._ready: set[Account] = set()
        self._unready: dict[Account, R] = {}
        self._before_these: set[Account] = set()
        self._left: Counter[Account] = Counter()
        self._passed_over: list[R] = []
        self._fits_nowhere: dict[Account, R] = {}

    def passed_over(self, request: R) -> None:
        """Note that a request fits nowhere now."""
        self._passed_over.append(request)

    def placed(self, request: R, instance: InstanceState) -> None:
        """Note that a request gets a place on an instance; it is among those that wait yet."""
        if not self._known:  # most rounds place nobody
            self._look()
        for alike in self._models.joined(self._rivals, instance):
            self._accounts.could_not_go(alike.values(), request, self._ready)
        unready = self._unready.values()
        self._accounts.could_not_go(unready, request, others=self._before_these)
        for one in self._passed_over:
            self._left[one.account] -= 1
            if not self._left[one.account]:
                self._fits_nowhere[one.account] = one
        self._passed_over.clear()
        passed = [one for one in self._fits_nowhere.values() if instance.serves(one.model)]
        self._accounts.could_not_go(passed, request)

    def _look(self) -> None:
        self._known = True
        waiting = [*self._for_decode, *self._for_prefill]
        self._rivals = self._models.rivals(waiting)
        self._left = Counter(one.account for one in waiting)
        self._ready = {one.account for one in self._for_decode}
        for one in self._for_prefill:
            if one.account in self._ready:
                self._before_these.add(one.account)
            elif self._may_prefill:
                self._unready[one.account] = one
