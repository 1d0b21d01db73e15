"""Noticing by their numbers that messages were lost, came late, or twice."""

from enum import Enum

__all__ = ["FAR", "Arrival", "Numbering"]

FAR = 32
"""From the last number, a number that is not to be believed; so many messages are lost at worst
to one that is nearer and is believed."""


class Arrival(Enum):
    """How a message comes."""

    NEXT = "next"
    """After the one before it."""
    AHEAD = "ahead"
    """Before one that is lost or late."""
    OLD = "old"
    """Again, or after one that was sent later."""
    FAR = "far"
    """With a number that no few lost messages explain: only a whole one is taken over."""


class Numbering:
    """The numbers of one sender's messages.

    A number that is far from the last one, on either side, is not taken over from a message that
    tells of changes only: whoever were believed a number far ahead would be heard no more. One
    that says how everything is begins the count anew.

    Attributes:
        last: of the latest message.
    """

    def __init__(self) -> None:
        self.last = 0

    def arrived(self, number: int, whole: bool) -> Arrival:
        """Note a message; return how it comes.

        Args:
            number: of the message.
            whole: whether it says how everything is.
        """
        ahead = number - self.last
        if abs(ahead) > FAR and not whole:
            return Arrival.FAR
        if -FAR <= ahead <= 0:
            return Arrival.OLD
        self.last = number
        return Arrival.NEXT if ahead == 1 else Arrival.AHEAD
