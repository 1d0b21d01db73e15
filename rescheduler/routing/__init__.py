"""Routing policies: which decode instance a prefilled request goes to."""

from rescheduler.routing.balance.balance_route import BR0, BRH, FastPhi, Overflow
from rescheduler.routing.bfio.policy import BFIO
from rescheduler.routing.heuristics.capacity import DedicatedSmallLarge, Headroom, MaxCapacity
from rescheduler.routing.heuristics.join_shortest_queue import (
    JSQ,
    PAB,
    DecodeBalancer,
    JSQLoad,
    JSQTokens,
    VLLMScore,
)
from rescheduler.routing.heuristics.pool_order import FCFS, MinMin, RoundRobin
from rescheduler.routing.learned.rl import LearnedRouter
from rescheduler.routing.policy import (
    Needs,
    RoutingPolicy,
    create_policy,
    policy_names,
    routing_policy,
)

__all__ = [
    "BFIO",
    "BR0",
    "BRH",
    "FCFS",
    "JSQ",
    "PAB",
    "DecodeBalancer",
    "DedicatedSmallLarge",
    "FastPhi",
    "Headroom",
    "JSQLoad",
    "JSQTokens",
    "LearnedRouter",
    "MaxCapacity",
    "MinMin",
    "Needs",
    "Overflow",
    "RoundRobin",
    "RoutingPolicy",
    "VLLMScore",
    "create_policy",
    "policy_names",
    "routing_policy",
]
