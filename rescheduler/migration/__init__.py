"""Migration planners: which running requests move to another decode instance, and when none."""

from rescheduler.migration.policy import (
    Migration,
    MigrationInputs,
    MigrationPolicy,
    Plan,
    create_migration_policy,
    migration_policy,
    migration_policy_names,
)
from rescheduler.migration.star import Star
from rescheduler.migration.survival import Survival

__all__ = [
    "Migration",
    "MigrationInputs",
    "MigrationPolicy",
    "Plan",
    "Star",
    "Survival",
    "create_migration_policy",
    "migration_policy",
    "migration_policy_names",
]
