"""How fast devices talk: to each other within a node, between nodes, and to their host.

Bytes per second and device, in one direction, as the vendor states them. The network belongs to the
cluster rather than to the device: given here is that of the vendor's own system, and another is
given by flag.
"""

from dataclasses import dataclass

GB = 1e9

# What a large collective gets of a link; nccl-tests on 8 A100 with NVLink: 200 to 240 of 300 GB/s.
LINK_EFFICIENCY = 0.75


@dataclass(frozen=True, kw_only=True)
class Links:
    """What one device is connected with."""

    node: float
    """Link to the other devices of its node, all together."""
    host: float
    """Link to host memory."""
    network: float | None
    """Link to other nodes; None where the vendor builds no such system."""
    source: str


_PCIE_3, _PCIE_4, _PCIE_5 = 15.75 * GB, 31.5 * GB, 63.0 * GB  # x16, after 128b/130b encoding

_V100 = Links(
    node=150 * GB,
    host=_PCIE_3,
    network=6.25 * GB,
    source="NVIDIA V100 datasheet, 2020: NVLink 300 GB/s both ways, PCIe 3.0; "
    "DGX-1 and DGX-2: 100 Gbit/s for two GPUs",
)
_A100 = Links(
    node=300 * GB,
    host=_PCIE_4,
    network=25 * GB,
    source="NVIDIA A100 datasheet, 2021: NVLink 600 GB/s both ways, PCIe 4.0; "
    "DGX A100: 200 Gbit/s for each GPU",
)
_A800 = Links(
    node=200 * GB,
    host=_PCIE_4,
    network=25 * GB,
    source="NVIDIA A800 datasheet, 2022: NVLink 400 GB/s both ways, PCIe 4.0; network as DGX A100",
)
_HOPPER = Links(
    node=450 * GB,
    host=_PCIE_5,
    network=50 * GB,
    source="NVIDIA H100 and H200 datasheets, 2023 and 2024: NVLink 900 GB/s both ways, PCIe 5.0; "
    "DGX H100: 400 Gbit/s for each GPU",
)
_B200 = Links(
    node=900 * GB,
    host=_PCIE_5,
    network=50 * GB,
    source="NVIDIA Blackwell datasheet, 2025: NVLink 1.8 TB/s both ways, PCIe 5.0; "
    "DGX B200: 400 Gbit/s for each GPU",
)
_MI300X = Links(
    node=448 * GB,
    host=_PCIE_5,
    network=None,
    source="AMD Instinct MI300X data sheet, 2023: 7 links of 128 GB/s both ways, PCIe 5.0",
)


def _pcie_only(bandwidth: float, generation: str) -> Links:
    """Cards without a switch between them; an NVLink bridge joins only two."""
    return Links(node=bandwidth, host=bandwidth, network=None, source=f"PCIe {generation} x16")


LINKS = {
    "v100-16g": _V100,
    "v100-32g": _V100,
    "v100-pcie-16g": _pcie_only(_PCIE_3, "3.0"),
    "v100-pcie-32g": _pcie_only(_PCIE_3, "3.0"),
    "a100-40g": _A100,
    "a100-80g": _A100,
    "a100-pcie-40g": _pcie_only(_PCIE_4, "4.0"),
    "a100-pcie-80g": _pcie_only(_PCIE_4, "4.0"),
    "a800-40g": _A800,
    "a800-80g": _A800,
    "a800-pcie-80g": _pcie_only(_PCIE_4, "4.0"),
    "h100": _HOPPER,
    "h100-pcie": _pcie_only(_PCIE_5, "5.0"),
    "h100-nvl": _pcie_only(_PCIE_5, "5.0"),
    "h200": _HOPPER,
    "h200-nvl": _pcie_only(_PCIE_5, "5.0"),
    "b200": _B200,
    "mi300x": _MI300X,
}
"""Links of each accelerator, by the keys of `datasheets.ACCELERATORS`."""
