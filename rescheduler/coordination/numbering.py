"""Noticing by their numbers that messages were lost, came late, or twice."""

from enum import Enum

__all__ = ["Arrival", "Numbering"]


class Arrival(Enum):
    """How a message comes."""

    NEXT = "next"
    """After the one before it."""
    AHEAD = "ahead"
    """Before one that is lost or late."""
    OLD = "old"
    """Again, or after one that was sent later."""


class Numbering:
    """The numbers of one sender's messages.

    Attributes:
        last: the highest that has come.
    """

    def __init__(self) -> None:
        self.last = 0

    def arrived(self, number: int) -> Arrival:
        """Note a message; return how it comes."""
        if number <= self.last:
            return Arrival.OLD
        arrival = Arrival.NEXT if number == self.last + 1 else Arrival.AHEAD
        self.last = number
        return arrival
