"""Routing policies: which decode instance a prefilled request goes to."""

from rescheduler.routing.balance_route import BR0, BRH, FastPhi, Overflow
from rescheduler.routing.bfio.policy import BFIO
from rescheduler.routing.capacity import DedicatedSmallLarge, Headroom, MaxCapacity
from rescheduler.routing.heuristics import (
    FCFS,
    JSQ,
    PAB,
    DecodeBalancer,
    JSQLoad,
    JSQTokens,
    MinMin,
    RoundRobin,
    VLLMScore,
)
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
