"""Routing policies: which decode instance a prefilled request goes to."""

from rescheduler.routing.balance_future_dp import BalanceFutureDP
from rescheduler.routing.balance_route import BR0, BRH
from rescheduler.routing.bfio import BFIO
from rescheduler.routing.decode_balancer import DecodeBalancer
from rescheduler.routing.dedicated_small_large import DedicatedSmallLarge
from rescheduler.routing.fcfs import FCFS
from rescheduler.routing.jsq import JSQ
from rescheduler.routing.jsq_load import JSQLoad
from rescheduler.routing.jsq_tokens import JSQTokens
from rescheduler.routing.max_capacity import MaxCapacity
from rescheduler.routing.max_min import MaxMin
from rescheduler.routing.min_min import MinMin
from rescheduler.routing.overflow_cost import FastPhi, Overflow
from rescheduler.routing.pab import PAB
from rescheduler.routing.policy import (
    Needs,
    RoutingPolicy,
    create_policy,
    policy_names,
    routing_policy,
)
from rescheduler.routing.power_of_d import PowerOfD
from rescheduler.routing.random_choice import RandomChoice
from rescheduler.routing.rl import LearnedRouter
from rescheduler.routing.round_robin import RoundRobin
from rescheduler.routing.throttled import Throttled
from rescheduler.routing.vllm_score import VLLMScore

__all__ = [
    "BFIO",
    "BR0",
    "BRH",
    "FCFS",
    "JSQ",
    "PAB",
    "BalanceFutureDP",
    "DecodeBalancer",
    "DedicatedSmallLarge",
    "FastPhi",
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
