"""What is known of a kind of device: the vendor's figures, or those of a `hardware.toml`.

Importing this is cheap. `hardware_file.py` reads and writes the files; what they describe goes
before the tables of `datasheets.py` and `links.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainmark.hardware.datasheets import ACCELERATORS, KEYS
from trainmark.hardware.links import LINKS

CPU = "cpu"


@dataclass(frozen=True)
class Figure:
    """A number, in bytes, bytes per second or operations per second, and who says so."""

    value: float
    source: str


SMALL_TABLE, LARGE_TABLE = 2**18, 2**23
"""Bytes of each of the tables that `trainmark calibrate` measures on a CPU."""
ByWidth = Mapping[int, float]
"""Rates measured at some widths."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `trainmark calibrate` found: per second, of one device, or of a whole machine's CPUs.

    These are rates that are reached, not shares of a peak: the plan takes them as they are.
    """

    source: str = ""
    copy: float | None = None
    """Bytes read and written by a copy within the device's memory."""
    gather: ByWidth = field(default_factory=dict)
    """Bytes of embedding rows that are read in random order, by bytes of a row."""
    update: ByWidth = field(default_factory=dict)
    """The same for rows that SGD changes, as the formula of `placement/costs.py` counts them."""
    adagrad: ByWidth = field(default_factory=dict)
    """The same for rows that Adagrad changes."""
    rowwise_adagrad: ByWidth = field(default_factory=dict)
    """The same for rows that Adagrad with one sum per row changes."""
    small: Mapping[str, ByWidth] = field(default_factory=dict)
    """These four by name, on a CPU, for a table that stays in its cache."""
    interaction: ByWidth = field(default_factory=dict)
    """Operations of dot products between a sample's rows on a CPU, forward and backward, by
    columns."""
    gemm: Mapping[str, ByWidth] = field(default_factory=dict)
    """Operations by precision, and by width of a square matrix that many rows are multiplied by."""
    layer: Mapping[str, ByWidth] = field(default_factory=dict)
    """Operations of an MLP's layer that learns, on a CPU: likewise by precision and width."""
    layer_s: Mapping[str, ByWidth] = field(default_factory=dict)
    """Seconds that such a layer takes besides, however few the samples."""
    step_s: float | None = None
    """Seconds of a DLRM's step on a CPU besides its layers, however few the samples."""
    id_s: float | None = None
    """Seconds of each id of a sample besides its row and its products: to read it, to sort it."""
    launch_s: float | None = None
    """Seconds between the starts of two small operations."""
    collective_s: float | None = None
    """Seconds of an all-reduce of one number."""
    node: float | None = None
    """Bytes of an all-reduce that leave a device within its node."""
    network: float | None = None
    """The same between nodes, while all devices of a node do so."""
    host: float | None = None
    """Bytes from pinned host memory to the device."""
    disk: float | None = None
    """Bytes read from a file that is not in memory."""

    def matmul(self, precision: str, width: float) -> float | None:
        """Operations per second of GEMMs of such a width; None where none was measured."""
        return between(self.gemm.get(precision, {}), width)

    def of_rows(self, kind: str, row_bytes: int, table_bytes: float) -> float | None:
        """Bytes of rows that are read (`gather`) or that an optimiser changes; SGD's, where its
        own was not measured."""
        name = kind if getattr(self, kind, None) else "gather" if kind == "gather" else "update"
        rate = between(getattr(self, name), row_bytes)
        small = between(self.small.get(name, {}), row_bytes)
        if rate is None or small is None:
            return rate
        return between({SMALL_TABLE: small, LARGE_TABLE: rate}, table_bytes)

    def scaled(self, share: float) -> "Measured":
        """The share of one of several ranks; they do not share links."""
        rates: dict[str, Any] = {name: _times(getattr(self, name), share) for name in BY_WIDTH}
        for name in ("small", "gemm", "layer"):
            rates[name] = {key: _times(of, share) for key, of in getattr(self, name).items()}
        copy, id_s = self.copy and self.copy * share, self.id_s and self.id_s / share
        return dataclasses.replace(self, **rates, copy=copy, id_s=id_s)


BY_WIDTH = ("gather", "update", "adagrad", "rowwise_adagrad", "interaction")


@dataclass(frozen=True, kw_only=True)
class Known:
    """One kind of device; None for what nobody says."""

    key: str
    name: str
    """The name that the driver (or the kernel) gives; empty in the tables, which know several."""
    memory: Figure | None = None
    bandwidth: Figure | None = None
    peaks: Mapping[str, Figure] = field(default_factory=dict)
    """Dense peaks by precision."""
    node: Figure | None = None
    """The link to other devices of a node, one way, all together."""
    host: Figure | None = None
    network: Figure | None = None
    """What one device gets of the network between nodes."""
    measured: Measured = Measured()

    def shared(self, ranks: int) -> "Known":
        """What one rank has: the ranks of a machine share its CPUs, but no accelerator."""
        if self.key != CPU:
            return self
        return dataclasses.replace(
            self,
            memory=_part(self.memory, ranks),
            bandwidth=_part(self.bandwidth, ranks),
            peaks={name: Figure(f.value / ranks, f.source) for name, f in self.peaks.items()},
            measured=self.measured.scaled(1 / ranks),
        )


def _part(figure: Figure | None, ranks: int) -> Figure | None:
    return figure and Figure(figure.value / ranks, figure.source)


def _times(rates: ByWidth, factor: float) -> ByWidth:
    return {width: rate * factor for width, rate in rates.items()}


def between(rates: ByWidth, width: float) -> float | None:
    """The rate at a width: a straight line, in logarithms, between the nearest two; beyond the
    first and the last, theirs."""
    if not rates:
        return None
    widths = sorted(rates)
    width = min(max(width, widths[0]), widths[-1])
    above = next(known for known in widths if known >= width)
    below = max(known for known in widths if known <= width)
    if above == below:
        return rates[above]
    share = math.log(width / below) / math.log(above / below)
    return math.exp((1 - share) * math.log(rates[below]) + share * math.log(rates[above]))


# --- all that are known

_described: dict[str, Known] = {}
"""By key: what the files say that this process was given."""


@contextmanager
def described(found: Known | None) -> Iterator[None]:
    """Let a file's description hold in this block."""
    before = dict(_described)
    _described.update({} if found is None else {found.key: found})
    try:
        yield
    finally:
        _described.clear()
        _described.update(before)


def key_of_described(name: str) -> str | None:
    """The key that a file gives to the device that a driver calls so."""
    same = (found.key for found in _described.values() if found.name.lower() == name.lower())
    return next(same, None)


def keys() -> tuple[str, ...]:
    """What a cluster may be made of."""
    return tuple(dict.fromkeys((*KEYS, *_described)))


def lookup(key: str) -> Known | None:
    """What is known of the hardware of this key, from a file or from the tables."""
    return _described.get(key) or from_tables(key)


def from_tables(key: str) -> Known | None:
    """What vendors say; None of CPUs, whose key does not tell them apart."""
    if key not in ACCELERATORS:
        return None
    sheet, links = ACCELERATORS[key], LINKS[key]
    return Known(
        key=key,
        name="",
        memory=Figure(sheet.memory_bytes, sheet.source),
        bandwidth=Figure(sheet.bandwidth, sheet.source),
        peaks={name: Figure(rate * 1e12, sheet.source) for name, rate in sheet.tflops.items()},
        node=Figure(links.node, links.source),
        host=Figure(links.host, links.source),
        network=None if links.network is None else Figure(links.network, links.source),
    )
