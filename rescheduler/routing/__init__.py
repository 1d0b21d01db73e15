"""Routing policies: which decode instance a prefilled request goes to."""

from rescheduler.routing.balance.balance_route import BR0, BRH
from rescheduler.routing.balance.overflow_cost import FastPhi, Overflow
from rescheduler.routing.bfio.policy import BFIO
from rescheduler.routing.heuristics.decode_balancer import DecodeBalancer
from rescheduler.routing.heuristics.dedicated_small_large import DedicatedSmallLarge
from rescheduler.routing.heuristics.fcfs import FCFS
from rescheduler.routing.heuristics.headroom import Headroom
from rescheduler.routing.heuristics.jsq import JSQ
from rescheduler.routing.heuristics.jsq_load import JSQLoad
from rescheduler.routing.heuristics.jsq_tokens import JSQTokens
from rescheduler.routing.heuristics.max_capacity import MaxCapacity
from rescheduler.routing.heuristics.max_min import MaxMin
from rescheduler.routing.heuristics.min_min import MinMin
from rescheduler.routing.heuristics.power_of_d import PowerOfD
from rescheduler.routing.heuristics.random_choice import RandomChoice
from rescheduler.routing.heuristics.round_robin import RoundRobin
from rescheduler.routing.heuristics.throttled import Throttled
from rescheduler.routing.heuristics.vllm_score import VLLMScore
from rescheduler.routing.learned.rl import LearnedRouter
from rescheduler.routing.pab import PAB
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
    "MaxMin",
    "MinMin",
    "Needs",
    "Overflow",
    "PowerOfD",
    "RandomChoice",
    "RoundRobin",
    "RoutingPolicy",
    "Throttled",
    "VLLMScore",
    "create_policy",
    "policy_names",
    "routing_policy",
]
