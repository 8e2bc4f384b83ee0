"""The devices that a plan is made for, as the numbers that its formulas need."""

from dataclasses import dataclass

from trainmark.errors import InputError
from trainmark.hardware.datasheets import ACCELERATORS
from trainmark.hardware.devices import Cluster
from trainmark.hardware.links import GB, LINKS
from trainmark.hardware.memory import RESERVED


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes, and bytes per second, of one device of a cluster."""

    devices: int
    """All of them."""
    devices_per_node: int
    memory: int | None
    """Of one device, less what is reserved; None where it is not known beforehand."""
    bandwidth: float
    """Of the device's memory."""
    node_link: float
    network: float
    host_link: float
    unknown: str = ""
    """Why these numbers serve to weigh alternatives, but not to predict times."""

    @property
    def nodes(self) -> int:
        return self.devices // self.devices_per_node


def machine(cluster: Cluster, network_gb_s: float | None = None) -> Machine:
    """The numbers of a cluster.

    Args:
        network_gb_s: what one device gets of the network between nodes, in GB/s; by default that
            of the vendor's own system.
    """
    if cluster.hardware not in ACCELERATORS:
        # Proportions of a server: good enough to tell which placement is better.
        return Machine(
            devices=cluster.world,
            devices_per_node=cluster.devices,
            memory=None,
            bandwidth=100 * GB,
            node_link=20 * GB,
            network=5 * GB,
            host_link=100 * GB,
            unknown=f"the memory and link bandwidths of {cluster.hardware!r} are not known",
        )
    device, links = ACCELERATORS[cluster.hardware], LINKS[cluster.hardware]
    network = links.network if network_gb_s is None else network_gb_s * GB
    if network is None and cluster.nodes > 1:
        raise InputError(
            f"The network between nodes of {cluster} is not known: give --network-gb-s, what one "
            "device gets of it in GB/s (25 for 200 Gbit/s)."
        )
    return Machine(
        devices=cluster.world,
        devices_per_node=cluster.devices,
        memory=int(device.memory_bytes * (1 - RESERVED)),
        bandwidth=device.bandwidth,
        node_link=links.node,
        network=network or links.node,
        host_link=links.host,
    )
