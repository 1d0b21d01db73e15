"""The routing policy of a deployment."""

from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.routing.policy import Needs, RoutingPolicy, create_policy

__all__ = ["deployed_policy"]


def deployed_policy(deployment: Deployment) -> RoutingPolicy:
    """Create the routing policy.

    Raises:
        DeploymentError: unknown policy, or one whose forecasts or budgets no instance publishes.
    """
    try:
        policy = create_policy(**deployment.routing)
        if deployment.routing.get("solver") == "exact":
            raise ValueError("solver: exact may take seconds, for which every stream would wait")
        policy.refuse_other_cluster(len(deployment.decode))
    except ValueError as error:
        raise DeploymentError(f"routing: {error}") from error
    if policy.needs_budget and deployment.prefill:
        raise DeploymentError(
            f"routing.name: {policy.name} chooses between engines that prefill and decode; here "
            f"{deployment.prefill[0].name} prefills for the others"
        )
    if policy.needs_budget and not all(i.telemetry for i in deployment.decode):
        raise DeploymentError(
            f"routing.name: {policy.name} requires the prefill budget of every instance, "
            "and some have no telemetry"
        )
    if policy.needs >= Needs.LENGTHS and not any(i.telemetry for i in deployment.decode):
        raise DeploymentError(
            f"routing.name: {policy.name} requires forecasts, and no decode instance has telemetry"
        )
    return policy
