"""`trainmark published`: all that the pages of the published systems print."""

import dataclasses
import json

from trainmark.errors import unknown
from trainmark.report import formats, published
from trainmark.report.formats import Titled
from trainmark.report.nvidia import gib
from trainmark.report.tables import NOT_APPLICABLE, PUBLISHED_COLUMNS, Column, make_grid, or_slash


def text(system: str | None, kind: str) -> str:
    """The tables as Markdown or CSV; as JSON, every figure of the file."""
    if kind == "json":
        return json.dumps(_figures(system), indent=1, ensure_ascii=False)
    return formats.WRITERS[kind](tables(system)).rstrip("\n")


def _figures(system: str | None) -> dict[str, object]:
    everything = dataclasses.asdict(published.everything())
    chosen = _chosen(system)
    kept: dict[str, object] = {"systems": {name: everything["systems"][name] for name in chosen}}
    for part in ("rows", "models", "inference"):
        kept[part] = [
            {key: value for key, value in row.items() if value is not None}
            for row in everything[part]
            if row["system"] in chosen
        ]
    return kept


def _chosen(system: str | None) -> list[str]:
    known = list(published.systems())
    if system is not None and system not in known:
        raise unknown("system", system, known)
    return known if system is None else [system]


def tables(system: str | None) -> list[Titled]:
    """The tables of one system or of all."""
    return [table for name in _chosen(system) for table in _of(name)]


def _of(system: str) -> list[Titled]:
    about = published.systems()[system]
    results = Titled(
        f"{about.source} ({system})",
        make_grid(_ROWS, published.rows_of(system)),
        (f"Data: {about.dataset}.", *([about.note] if about.note else [])),
    )
    further = [
        Titled(f"{about.by}: models", make_grid(_MODELS, published.models_of(system))),
        Titled(f"{about.by}: inference", make_grid(_INFERENCE, published.inference_of(system))),
    ]
    return [results, *(table for table in further if table.grid.rows)]


_RUN = Column("run", lambda r: r.run, numeric=False)

_ROWS = (
    _RUN,
    *PUBLISHED_COLUMNS,
    Column("time speedup", lambda r: or_slash(r.time_speedup, "g"), optional=True),
    Column("throughput speedup", lambda r: or_slash(r.throughput_speedup, "g"), optional=True),
    Column("speedup over CPU", lambda r: or_slash(r.cpu_speedup, "g"), optional=True),
)

_MODELS = (
    _RUN,
    Column("name", lambda m: m.name, numeric=False),
    Column("frequency threshold", lambda m: or_slash(m.frequency_threshold, "g"), optional=True),
    Column("parameters", lambda m: or_slash(m.parameters, "g"), optional=True),
    Column("GiB", gib),
    Column(
        "rows per table",
        lambda m: ",".join(map(str, m.table_rows or ())) or NOT_APPLICABLE,
        optional=True,
        numeric=False,
    ),
)

_INFERENCE = (
    _RUN,
    Column("hardware", lambda r: r.hardware, numeric=False),
    Column("precision", lambda r: r.precision, numeric=False),
    Column("batch", lambda r: str(r.batch)),
    Column("samples/s", lambda r: f"{r.samples_per_s:.0f}"),
    Column("mean ms", lambda r: f"{r.mean_ms:.2f}"),
    Column("throughput speedup", lambda r: or_slash(r.throughput_speedup, "g"), optional=True),
)
