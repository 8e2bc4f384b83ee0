"""`hardware.toml`: what a user knows of a device, by hand or from `trainmark calibrate`.

docs/planning.md describes it. Figures that a file leaves out are the vendor's, where the tables
have them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainmark.bounds import Positive, Width
from trainmark.errors import InputError
from trainmark.hardware import known
from trainmark.hardware.datasheets import KEYS
from trainmark.hardware.devices import Precision, key_of
from trainmark.hardware.known import CPU, Figure, Known, Measured, from_tables
from trainmark.validation import parse, read_mapping

FILE_NAME = "hardware.toml"
GB, GIB, TERA, MICRO = 1e9, 2**30, 1e12, 1e-6

_STRICT = {"extra": "forbid"}
_OfRows = Literal["gather", "update", "adagrad", "rowwise_adagrad"]


# --- as it is written


@dataclass(frozen=True)
class Size:
    __pydantic_config__ = _STRICT
    gib: Positive
    source: str


@dataclass(frozen=True)
class Rate:
    __pydantic_config__ = _STRICT
    gb_s: Positive
    source: str


@dataclass(frozen=True)
class Compute:
    __pydantic_config__ = _STRICT
    tflops: Positive
    source: str


@dataclass(frozen=True)
class LinkRates:
    __pydantic_config__ = _STRICT
    node: Rate | None = None
    host: Rate | None = None
    network: Rate | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    __pydantic_config__ = _STRICT
    source: str
    copy_gb_s: Positive | None = None
    gather_gb_s: dict[Width, Positive] = field(default_factory=dict)
    update_gb_s: dict[Width, Positive] = field(default_factory=dict)
    adagrad_gb_s: dict[Width, Positive] = field(default_factory=dict)
    rowwise_adagrad_gb_s: dict[Width, Positive] = field(default_factory=dict)
    small_table_gb_s: dict[_OfRows, dict[Width, Positive]] = field(default_factory=dict)
    interaction_tflops: dict[Width, Positive] = field(default_factory=dict)
    gemm_tflops: dict[Precision, dict[Width, Positive]] = field(default_factory=dict)
    layer_tflops: dict[Precision, dict[Width, Positive]] = field(default_factory=dict)
    layer_us: dict[Precision, dict[Width, Positive]] = field(default_factory=dict)
    step_us: Positive | None = None
    id_us: Positive | None = None
    launch_us: Positive | None = None
    collective_us: Positive | None = None
    threads_us: Positive | None = None  # of earlier files; no plan needs it any more
    node_gb_s: Positive | None = None
    network_gb_s: Positive | None = None
    host_gb_s: Positive | None = None
    disk_gb_s: Positive | None = None


class Written(NamedTuple):
    """How a field of `Measured` is written."""

    key: str
    """Its field of `MeasuredRates`."""
    unit: float
    by_name: bool = False
    """Whether it has a table of rates for each of several names, which is a section of its own."""


_RATES = ("copy", "gather", "update", "adagrad", "rowwise_adagrad", "node", "network", "host")
WRITTEN = {name: Written(f"{name}_gb_s", GB) for name in (*_RATES, "disk")} | {
    "interaction": Written("interaction_tflops", TERA),
    "step_s": Written("step_us", MICRO),
    "id_s": Written("id_us", MICRO),
    "launch_s": Written("launch_us", MICRO),
    "collective_s": Written("collective_us", MICRO),
    "small": Written("small_table_gb_s", GB, by_name=True),
    "gemm": Written("gemm_tflops", TERA, by_name=True),
    "layer": Written("layer_tflops", TERA, by_name=True),
    "layer_s": Written("layer_us", MICRO, by_name=True),
}
"""By the fields of `Measured`, in the order of a file."""


@dataclass(frozen=True, kw_only=True)
class Description:
    __pydantic_config__ = _STRICT
    name: str
    key: str | None = None
    memory: Size | None = None
    bandwidth: Rate | None = None
    peak: dict[Precision, Compute] = field(default_factory=dict)
    links: LinkRates = LinkRates()
    measured: MeasuredRates | None = None


# --- reading


@contextmanager
def described(path: Path | None) -> Iterator[Known | None]:
    """Let what a file says hold in this block."""
    found = None if path is None else read(path)
    with known.described(found):
        yield found


def read(path: Path) -> Known:
    """What a file says; a bad one is an `InputError`."""
    given = parse(Description, read_mapping(path, "Hardware file"), str(path))
    return _known(given, _checked_key(given, path))


def _checked_key(given: Description, path: Path) -> str:
    own = key_of(given.name)
    key = own if given.key is None else given.key
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key):
        raise InputError(
            f"{path}: key must be small letters and digits, with hyphens between them, such as "
            f"my-gpu-80g. Received: {key!r}."
        )
    if key != CPU and key in KEYS and key != own:
        raise InputError(
            f"{path}: key {key!r} is that of another device than {given.name!r}. Give another key, "
            "or leave it out."
        )
    return key


def _known(given: Description, key: str) -> Known:
    table = from_tables(key) or Known(key=key, name="")
    links = given.links
    peaks: dict[str, Figure] = {
        name: Figure(one.tflops * TERA, one.source) for name, one in given.peak.items()
    }
    return Known(
        key=key,
        name=given.name,
        memory=Figure(given.memory.gib * GIB, given.memory.source)
        if given.memory
        else table.memory,
        bandwidth=_figure(given.bandwidth) or table.bandwidth,
        peaks={**table.peaks, **peaks},
        node=_figure(links.node) or table.node,
        host=_figure(links.host) or table.host,
        network=_figure(links.network) or table.network,
        measured=_measured(given.measured) if given.measured else Measured(),
    )


def _figure(rate: Rate | None) -> Figure | None:
    return Figure(rate.gb_s * GB, rate.source) if rate else None


def _measured(given: MeasuredRates) -> Measured:
    rates = {name: _in_units(getattr(given, of.key), of.unit) for name, of in WRITTEN.items()}
    return Measured(source=given.source, **rates)


def _in_units(value: Any, unit: float) -> Any:
    """A number, or a table of such, in bytes, operations or seconds; None stays None."""
    if isinstance(value, Mapping):
        return {key: _in_units(one, unit) for key, one in value.items()}
    return None if value is None else value * unit


# --- writing


def text(found: Known) -> str:
    """The text of a file that says the same."""
    links = {name: getattr(found, name) for name in ("node", "host", "network")}
    lines = [f"name = {_quoted(found.name)}", f"key = {_quoted(found.key)}"]
    lines += _line("memory", "gib", found.memory, GIB)
    lines += _line("bandwidth", "gb_s", found.bandwidth, GB)
    if found.peaks:
        lines += ["", "[peak]"]
    for name, peak in found.peaks.items():
        lines += _line(name, "tflops", peak, TERA)
    if any(links.values()):
        lines += ["", "[links]"]
    for name, link in links.items():
        lines += _line(name, "gb_s", link, GB)
    return "\n".join(lines + _measured_lines(found.measured)) + "\n"


def _measured_lines(found: Measured) -> list[str]:
    if not found.source:
        return []
    lines = ["", "[measured]", f"source = {_quoted(found.source)}"]
    for name, of in WRITTEN.items():
        value = getattr(found, name)
        if value and of.by_name:
            lines += ["", f"[measured.{of.key}]"]
            lines += [f"{key} = {_value(rates, of.unit)}" for key, rates in value.items()]
        elif value:
            lines.append(f"{of.key} = {_value(value, of.unit)}")
    return lines


def _line(name: str, unit: str, figure: Figure | None, scale: float) -> list[str]:
    if figure is None:
        return []
    value, source = _value(figure.value, scale), _quoted(figure.source)
    return [f"{name} = {{{unit} = {value}, source = {source}}}"]


def _value(value: Any, unit: float) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_value(rate, unit)}' for key, rate in value.items())}}}"
    return f"{value / unit:.6g}"


def _quoted(words: str) -> str:
    """A TOML string; JSON's escapes are TOML's, but for the delete character."""
    return json.dumps(words).replace("\x7f", "\\u007f")
