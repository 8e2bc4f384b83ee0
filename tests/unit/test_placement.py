"""A placement as plain data: written, edited, read back and checked."""

import dataclasses
import json
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from trainmark.embeddings.placement import placement as placements
from trainmark.embeddings.placement.placement import (
    Placement,
    Shard,
    TablePlacement,
    whole_everywhere,
)
from trainmark.errors import InputError

ROWS, DIM, DEVICES = (100, 7, 60, 11), 8, 3


def shard(device: int, rows: tuple[int, int], columns: tuple[int, int]) -> Shard:
    return Shard(device=device, rows=rows, columns=columns)


PLACED = Placement(
    devices=DEVICES,
    tables=(
        TablePlacement(
            table=0,
            sharding="row_wise",
            shards=(
                shard(0, (0, 33), (0, 8)),
                shard(1, (33, 90), (0, 8)),
                shard(0, (90, 100), (0, 8)),
            ),
            reason="it is large",
        ),
        TablePlacement(table=1, sharding="data_parallel", shards=whole_everywhere(7, DIM, DEVICES)),
        TablePlacement(
            table=2,
            sharding="column_wise",
            shards=(shard(2, (0, 60), (0, 3)), shard(1, (0, 60), (3, 8))),
            memory="host",
        ),
        TablePlacement(table=3, sharding="table_wise", shards=(shard(2, (0, 11), (0, 8)),)),
    ),
)


def plain() -> Any:
    return json.loads(placements.to_json(PLACED))


def read(tmp_path: Path, data: Any, devices: int = DEVICES) -> Placement:
    path = tmp_path / "placement.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return placements.read(path, ROWS, DIM, devices)


def test_written_and_read_back(tmp_path: Path) -> None:
    assert read(tmp_path, placements.to_json(PLACED)) == PLACED


def test_a_data_parallel_table_needs_no_shards(tmp_path: Path) -> None:
    assert "shards" not in plain()["tables"][1]
    with_shards = plain()
    with_shards["tables"][1]["shards"] = [
        dataclasses.asdict(s) for s in whole_everywhere(7, DIM, DEVICES)
    ]
    assert read(tmp_path, with_shards) == PLACED


def test_what_a_device_holds() -> None:
    assert [(t.table, s.rows, s.columns) for t, s in PLACED.on(1)] == [
        (0, (33, 90), (0, 8)),
        (1, (0, 7), (0, 8)),
        (2, (0, 60), (3, 8)),
    ]


def edit(*path: Any, value: Any) -> Callable[[Any], None]:
    *before, last = path
    return lambda data: reduce(getitem, before, data).__setitem__(last, value)


def drop(*path: Any) -> Callable[[Any], None]:
    *before, last = path
    return lambda data: reduce(getitem, before, data).__delitem__(last)


WRONG = [
    (edit("tables", 0, "shards", 1, "rows", value=[34, 90]), "rows 33 to 34 are on no device"),
    (edit("tables", 0, "shards", 1, "rows", value=[30, 90]), "rows 30 to 33 are placed twice"),
    (edit("tables", 0, "shards", 2, "rows", value=[90, 99]), "rows 99 to 100 are on no device"),
    (edit("tables", 0, "shards", 2, "rows", value=[90, 101]), "has only 100 rows; a shard ends"),
    (edit("tables", 0, "shards", 2, "rows", value=[90, 90]), "a shard has no rows: [90, 90]"),
    (edit("tables", 0, "shards", 0, "columns", value=[0, 7]), "must have all columns, 0 to 8"),
    (edit("tables", 2, "shards", 0, "columns", value=[1, 3]), "columns 0 to 1 are on no device"),
    (edit("tables", 2, "shards", 0, "rows", value=[0, 50]), "must have all rows, 0 to 60"),
    (edit("tables", 3, "shards", 0, "device", value=3), "device 3 does not exist; the devices are"),
    (edit("tables", 3, "shards", 0, "device", value=-1), "device -1 does not exist"),
    (edit("tables", 3, "table", value=4), "Table 4 does not exist: the tables are 0 to 3"),
    (edit("tables", 3, "table", value=2), "Table 2 must be placed once. Received: 2 times"),
    (drop("tables", 3), "Table 3 must be placed once. Received: 0 times"),
    (edit("tables", 3, "shards", value=[]), "table_wise and must have 1 shard. Received: 0"),
    (edit("tables", 0, "shards", value=[]), "rows 0 to 100 are on no device"),
    (edit("tables", 1, "memory", value="host"), "must be in device memory"),
    (edit("tables", 1, "shards", value=[]), "does not lie whole on every device once"),
    (edit("tables", 3, "sharding", value="row_vise"), "tables.3.sharding"),
    (edit("tables", 3, "shards", 0, "rows", value=[0, 11, 12]), "tables.3.shards.0.rows"),
    (edit("tables", 3, "colour", value="red"), "tables.3.colour is not a known key"),
    (drop("tables", 3, "shards"), "tables.3.shards is missing"),
    (edit("devices", value=0), "devices must be at least 1"),
    (edit("devices", value=4), "is for 4 devices, and the run has 3"),
    (edit("schema", value="trainmark.placement/2"), "is no placement: expected"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_an_edit_that_is_wrong_is_named(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    data = plain()
    change(data)
    with pytest.raises(InputError) as error:
        read(tmp_path, data)
    assert message in str(error.value)
    assert "placement.json" in str(error.value)


def test_all_errors_at_once(tmp_path: Path) -> None:
    data = plain()
    for change, _ in (WRONG[0], WRONG[6], WRONG[8]):
        change(data)
    with pytest.raises(InputError) as error:
        read(tmp_path, data)
    assert str(error.value).startswith("3 problems:")
    assert all(message in str(error.value) for _, message in (WRONG[0], WRONG[6], WRONG[8]))


@pytest.mark.parametrize("text", ["", "{", "[]", '"placement"', "null"])
def test_what_is_no_placement(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"placement\.json"):
        read(tmp_path, text)


def test_a_data_parallel_table_that_does_not_exist(tmp_path: Path) -> None:
    data = plain()
    data["tables"].append({"table": 9, "sharding": "data_parallel"})
    with pytest.raises(InputError, match=r"Table 9 does not exist: the tables are 0 to 3\.$"):
        read(tmp_path, data)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        placements.read(tmp_path / "none.json", ROWS, DIM, DEVICES)
