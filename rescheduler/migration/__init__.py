"""Migration planners: which running requests move to another decode instance, and when none."""

from rescheduler.migration.policy import (
    Migration,
    MigrationPolicy,
    Plan,
    create_migration_policy,
    migration_policy,
    migration_policy_names,
)
from rescheduler.migration.problem import MigrationProblem
from rescheduler.migration.star import Star
from rescheduler.migration.survival import Survival

__all__ = [
    "Migration",
    "MigrationPolicy",
    "MigrationProblem",
    "Plan",
    "Star",
    "Survival",
    "create_migration_policy",
    "migration_policy",
    "migration_policy_names",
]
