"""`headway stop`: end a deployment on a Ray cluster."""

from pathlib import Path

from rescheduler.commands.interrupts import ending_signals_held
from rescheduler.engines.launch_checks import LaunchError
from rescheduler.engines.launch_progress import LaunchProgress
from rescheduler.on_ray.launch_on_ray import take_down
from rescheduler.on_ray.ray_cluster import connected
from rescheduler.on_ray.ray_deployment import RayDeployment, cluster_of

__all__ = ["stop"]


def stop(config: RayDeployment | None = None) -> None:
    """Stop a deployment that runs on a Ray cluster, and give back what it has reserved.

    The proxies go first: running requests have `proxy.shutdown_seconds` to finish.

    Args:
        config: the deployment, for the address of its cluster and its namespace; without it, the
            cluster that this machine belongs to, and ``headway``.

    Raises:
        LaunchError: there is no such cluster, or no such deployment in it.
    """
    address, namespace = cluster_of(config)
    with connected(address, namespace) as cluster:
        if not cluster.names() and not cluster.reserved():
            raise LaunchError(f"no deployment runs in namespace {namespace!r}")
        with LaunchProgress(Path()) as progress, ending_signals_held():
            take_down(cluster, progress.report)
