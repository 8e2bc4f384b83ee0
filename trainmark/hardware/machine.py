"""The devices that a plan is made for, as the numbers that its formulas need."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster, Peak, Unknown, peak_flops
from trainmark.hardware.known import CPU, Figure, Known, Measured, lookup
from trainmark.hardware.links import GB, LINK_EFFICIENCY
from trainmark.hardware.memory import RESERVED

ELSEWHERE = (0.75, 1.5)
"""Of a predicted time, where nothing like it was measured: the least and the most expected. An
assumption."""


class NotKnownError(InputError):
    """No time can be predicted: a figure of the device is not known. Says which."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes, and bytes per second, of one device of a cluster."""

    devices: int
    """All devices of the cluster."""
    devices_per_node: int
    memory: int | None
    """Memory of one device, less what is reserved; None where it is not known beforehand."""
    bandwidth: float
    """Bandwidth of the device's memory."""
    node_link: float
    network: float
    host_link: float
    measured: Measured = Measured()
    """Measured rates; they take precedence over shares of the bandwidth."""
    unknown: str = ""
    """Why these numbers serve to weigh alternatives, but not to predict times."""
    unknown_host: str = ""
    """The same, where tables lie in host memory."""

    @property
    def nodes(self) -> int:
        return self.devices // self.devices_per_node

    def check_known(self) -> None:
        """Refuse to predict times where the numbers only serve to weigh alternatives."""
        if self.unknown:
            raise NotKnownError(self.unknown)

    def streaming(self, share: float) -> float:
        """Rate of bytes read and written in order: as measured, or a share of the bandwidth."""
        return self.measured.copy or self.bandwidth * share

    def of_rows(self, kind: str, row_bytes: int, table_bytes: float, share: float) -> float:
        """Likewise for rows that are read in random order, or that an optimiser changes."""
        return self.measured.of_rows(kind, row_bytes, table_bytes) or self.bandwidth * share


# Proportions of a server: good enough to tell which placement is better.
_BANDWIDTH, _NODE_LINK, _NETWORK, _HOST_LINK = 100 * GB, 20 * GB, 5 * GB, 100 * GB


def machine(cluster: Cluster, network_gb_s: float | None = None) -> Machine:
    """The numbers of a cluster.

    Args:
        network_gb_s: what one device gets of the network between nodes, in GB/s; by default that
            of the vendor's own system, or of a `hardware.toml`.
    """
    found = lookup(cluster.hardware)
    device = found.shared(cluster.devices) if found else Known(key=cluster.hardware, name="")
    measured = device.measured
    bandwidth = measured.copy or _value(device, "bandwidth")
    node = _attained(measured.node) or _value(device, "node")
    network = network_gb_s and network_gb_s * GB
    network = network or _attained(measured.network) or _value(device, "network")
    host = measured.host or _value(device, "host") or (bandwidth if device.key == CPU else None)
    if found and network is None and cluster.nodes > 1:
        raise NotKnownError(
            f"The network between nodes of {cluster} is not known: give --network-gb-s, what one "
            "device gets of it in GB/s (25 for 200 Gbit/s)."
        )
    missing = {
        "the memory bandwidth": bandwidth,
        "the link between devices": node or cluster.devices == 1,
    }
    lacking = [what for what, rate in missing.items() if not rate]
    if found is None:
        lacking = ["the memory", "link bandwidths"]
    return Machine(
        devices=cluster.world,
        devices_per_node=cluster.devices,
        memory=int(device.memory.value * (1 - RESERVED)) if device.memory else None,
        bandwidth=_value(device, "bandwidth") or bandwidth or _BANDWIDTH,
        node_link=node or _NODE_LINK,
        network=network or (node if found and node else _NETWORK),
        host_link=host or _HOST_LINK,
        measured=measured,
        unknown=_not_known(cluster, lacking),
        unknown_host=_not_known(cluster, [] if host else ["the link to the host"]),
    )


def _not_known(cluster: Cluster, lacking: Sequence[str]) -> str:
    if not lacking:
        return ""
    verb, them = ("is", "it") if len(lacking) == 1 else ("are", "them")
    what = f"{' and '.join(lacking)} of {cluster.hardware!r}"
    return f"{what} {verb} not known (trainmark calibrate measures {them})"


def _value(device: Known, name: str) -> float | None:
    figure = getattr(device, name)
    return None if figure is None else float(figure.value)


def _attained(rate: float | None) -> float | None:
    """A link on which collectives, which get a share of it, are as fast as measured."""
    return rate and rate / LINK_EFFICIENCY


def peak_of(cluster: Cluster, precision: str) -> Peak | Unknown:
    """The peak of one rank: the ranks of a machine share its CPUs."""
    peak = peak_flops(cluster.hardware, precision)
    if isinstance(peak, Unknown) or cluster.hardware != CPU:
        return peak
    return replace(peak, flops=peak.flops / cluster.devices)


def needed_peak(cluster: Cluster, measured: Measured, precision: str) -> float:
    """Operations per second, for a prediction in a precision whose GEMMs were not measured."""
    peak = peak_of(cluster, precision)
    if isinstance(peak, Peak):
        return peak.flops
    names = ", ".join(measured.gemm)
    made = f"GEMMs were measured in {names}, not in {precision}"
    raise NotKnownError(made if names else peak.reason)


Used = Literal[
    "layers",
    "GEMMs",
    "peak",
    "memory bandwidth",
    "reading rows",
    "updating rows",
    "link between devices",
    "network",
    "link to the host",
]
"""Figures of a device that a time may be made of."""


def sources(cluster: Cluster, precision: str, used: Collection[Used]) -> list[str]:
    """The sources of the figures that a plan of this cluster uses, as `figures: source`."""
    found = lookup(cluster.hardware)
    if found is None:
        return []
    measured = found.measured
    figures: dict[Used, tuple[object, Figure | None]] = {  # measured; else as stated
        "layers": (measured.layer, None),
        "GEMMs": (measured.gemm, None),
        "peak": (None, found.peaks.get(precision)),
        "memory bandwidth": (measured.copy, found.bandwidth),
        "reading rows": (measured.gather, None),
        "updating rows": (measured.update, None),
        "link between devices": (measured.node, found.node),
        "network": (measured.network, found.network),
        "link to the host": (measured.host, found.host),
    }
    said: dict[str, list[str]] = {}
    for what, (is_measured, stated) in figures.items():
        source = measured.source if is_measured else stated and stated.source
        if source and what in used:
            said.setdefault(source, []).append(what)
    return [f"{', '.join(names)}: {source}" for source, names in said.items()]


def used_links(cluster: Cluster) -> list[Used]:
    """The links between the devices."""
    links: dict[Used, bool] = {
        "link between devices": cluster.devices > 1,
        "network": cluster.nodes > 1,
    }
    return [name for name, is_used in links.items() if is_used]
