"""The order of service: which waiting request goes first, wherever requests wait."""

from rescheduler.ordering.service_order import ServiceOrder, create_order, service_order

__all__ = ["ServiceOrder", "create_order", "service_order"]
