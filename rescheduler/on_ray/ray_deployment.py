"""A deployment for Ray: counts and resources in place of addresses."""

from typing import Annotated, Literal

import msgspec

from rescheduler.engines.deployment import Deployment, DeploymentError

__all__ = ["RayDeployment", "RayInstances", "RayOptions", "cluster_of"]

_ADDRESS, _NAMESPACE = "auto", "headway"

Count = Annotated[int, msgspec.Meta(gt=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Resource = Annotated[str, msgspec.Meta(min_length=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RayInstances(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Instances that are alike; they are named by their role, as ``decode-0`` and ``decode-1``.

    Attributes:
        role: ``prefill`` or ``decode``.
        replicas: how many there are.
        num_cpus: CPUs that each reserves.
        num_gpus: GPUs that each reserves, all on one node.
        resources: that each reserves besides, by the names that the nodes give them.
        arguments: further flags for their vLLM, after those of ``engine``.
    """

    role: Literal["prefill", "decode"]
    replicas: Count = 1
    num_cpus: Amount = 1.0
    num_gpus: Amount = 0.0
    resources: dict[Resource, Amount] = {}
    arguments: list[str] = []

    @property
    def bundle(self) -> dict[str, float]:
        """What each reserves."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount}


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which cluster a deployment runs on, and how much of it.

    Attributes:
        instances: what is started, in place of the deployment's own ``instances``.
        address: of the cluster, HOST:PORT; ``auto``: the one that this machine belongs to.
        namespace: of the actors; each deployment of a cluster needs one of its own.
        proxies: how many `headway serve`.
        proxy_cpus: CPUs that each of these reserves.
        strategy: nodes for engines and proxies: as many as possible (``SPREAD``), or as few
            (``PACK``).
        reserve_seconds: to wait for resources, as for nodes that an autoscaler adds.
    """

    instances: list[RayInstances]
    address: str = _ADDRESS
    namespace: str = _NAMESPACE
    proxies: Count = 1
    proxy_cpus: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    strategy: Literal["SPREAD", "PACK"] = "SPREAD"
    reserve_seconds: Seconds = 60.0


class RayDeployment(Deployment, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment that either has addresses, or is to get them on a Ray cluster.

    Attributes:
        model: an embedded model's name, a folder, or a Hugging Face id.
        instances: with their addresses; none if ``ray`` says how many to start.
        served_model_name: what clients call it; empty: ``model``.
        keys: folder created by `headway keys`, needed where an endpoint leaves the machine.
        routing: name and options of a routing policy.
        migration: name, ``interval_seconds`` and options of a migration policy; None: requests
            only move away from instances that drain or die.
        coordinator: what `headway coordinator` and the proxies that it serves need to know; None:
            `headway serve` places and moves by itself, and must be the only proxy.
        proxy: options of `headway serve`.
        engine: options of `headway launch`.
        ray: how much to start on which Ray cluster, for ``--on ray``.
    """

    ray: RayOptions | None = None

    def check(self) -> None:
        """Refuse what the types allow and no deployment can mean.

        Raises:
            DeploymentError: names the field, and what it should be.
        """
        if self.ray is None:
            super().check()
            return
        if self.instances:
            raise DeploymentError(
                "instances: give addresses there, or counts in ray.instances, not both"
            )
        if not any(group.role == "decode" for group in self.ray.instances):
            raise DeploymentError("ray.instances: at least one must have the role decode")
        for i, group in enumerate(self.ray.instances):
            if not group.bundle:
                raise DeploymentError(f"ray.instances[{i}]: must reserve something")
        self.check_policies()


def cluster_of(deployment: RayDeployment | None) -> tuple[str, str]:
    """Return the address of a deployment's cluster and its namespace there.

    Raises:
        DeploymentError: it is not for Ray.
    """
    if deployment is None:
        return _ADDRESS, _NAMESPACE
    if deployment.ray is None:
        raise DeploymentError("ray: the deployment has no such section: see docs/deploy-ray.md")
    return deployment.ray.address, deployment.ray.namespace
