"""The tables of speed in docs and in the README say what benchmarks/results do."""

import re
from typing import Any

import pytest

from benchmarks.common import read_rows
from tests.docs.commands import table

PAGE = "docs/performance.md"
MULTI_HOT = "docs/multi_hot.md"
PREPARATION = "docs/preparation_speed.md"
Row = dict[str, Any]


def only(rows: list[Row], **wanted: Any) -> Row:
    (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return found


def assert_rounded(shown: str, value: float) -> None:
    """As many digits as are shown, and those of the value."""
    decimals = len(shown.partition(".")[2])
    assert float(shown) == pytest.approx(value, abs=0.5001 * 10**-decimals)


def test_whole_steps() -> None:
    rows, lines = read_rows("dlrm_gpu_h200"), table(PAGE, "tables | rows |")
    ours = [r for r in rows if r["system"] == "trainmark" and r["source"] == "resident"]
    assert 2 * len(lines) == len(ours)
    for name, _, stored, mlps, batch, power_law, uniform, memory in lines:
        case = {
            "size": name.partition(",")[0], "tables_precision": stored, "mlp_precision": mlps,
            "batch": int(batch.replace(",", "")),
        }  # fmt: skip
        for indices, shown in (("power_law", power_law), ("uniform", uniform)):
            row = only(ours, **case, indices=indices)
            assert_rounded(shown, row["samples_per_s"] / 1e6)
            assert_rounded(memory.removesuffix(" GiB"), row["memory_gib"])


def test_steps_with_several_ids_per_feature() -> None:
    rows = read_rows("dlrm_dcnv2_h200")
    lines = table(MULTI_HOT, "system | tables | MLPs |")
    assert len(lines) == len(rows)
    for name, stored, mlps, ids, *figures, memory in lines:
        row = only(
            rows, system=name.partition(",")[0].lower(), tables_precision=stored,
            mlp_precision=mlps, indices=ids.replace(" ", "_"),
        )  # fmt: skip
        split = row["split_ms"]
        parts = [split[part] for part in ("mlp", "cross", "update", "forward", "sort")]
        parts += [split["copy"] + split["other"]]
        expected = [row["samples_per_s"] / 1e6, row["step_ms"], *parts]
        for shown, value in zip(figures, expected, strict=True):
            assert_rounded(shown, value)
        assert_rounded(memory.removesuffix(" GiB"), row["memory_gib"])


def test_what_tables_under_several_ids_per_feature_cost() -> None:
    rows = read_rows("dlrm_dcnv2_quality")
    lines = table(MULTI_HOT, "tables | Adagrad's sums |")
    assert [line[:2] for line in lines] == [["bf16", "bf16"], ["int8", "bf16"]]
    for stored, sums, *seeds in lines:
        for seed, cell in enumerate(seeds):
            row = only(rows, tables_precision=stored, seed=seed)
            assert row["changes"]["table_format"]["state_precision"] == sums
            shown, error = cell.split(" +- ")
            assert_rounded(shown, row["difference"])
            assert_rounded(error, row["difference_standard_error"])
    assert len(rows) == 9  # and three in fp32


def test_other_systems() -> None:
    rows = read_rows("dlrm_gpu_h200")
    same = {"size": "small", "batch": 65536, "indices": "power_law", "source": "resident"}
    names = ("fbgemm", "pytorch", "torchrec-compiled", "torchrec")
    for name, (_, speed, *ratios) in zip(names, table(PAGE, "system |"), strict=True):
        peer = only(rows, system=name, **same)
        assert_rounded(speed, peer["samples_per_s"] / 1e6)
        for mlps, shown in zip(("bf16", "fp8"), ratios, strict=True):
            our = only(
                rows, system="trainmark", tables_precision="fp32", mlp_precision=mlps, **same
            )
            assert_rounded(shown.removesuffix(" x"), our["samples_per_s"] / peer["samples_per_s"])


VARIANTS = {
    "fp8, constant scale of gradients** (earlier commit)": "fp8_constant_scale",
    "int8, rounded to nearest": "int8_nearest",
}


def test_what_precisions_cost() -> None:
    rows = read_rows("dlrm_precision_quality")
    lines = table(PAGE, "tables | MLPs |")
    assert len(lines) == 11
    for stored, mlps, auc, difference, seeds, _ in lines:
        case = {
            "tables_precision": VARIANTS.get(stored, stored),
            "mlp_precision": VARIANTS.get(mlps, mlps),
        }
        row = only(rows, **case, seed=0)
        assert_rounded(auc, row["auc"])
        if difference:
            shown, error = difference.replace("*", "").split(" +- ")
            assert_rounded(shown, row["difference"])
            assert_rounded(error, row["difference_standard_error"])
        kind = "auc" if "AUC" in seeds else "difference"
        for seed, shown in enumerate(re.findall(r"-?0\.\d+", seeds), start=1):
            assert_rounded(shown, only(rows, **case, seed=seed)[kind])


def test_other_widths() -> None:
    rows = read_rows("dlrm_kernels_h200")
    kernels = ("forward", "backward", "update sgd", "update rowwise_adagrad", "update adagrad")
    lines = table(PAGE, "rows of |")
    assert len(lines) == 6
    for name, *cells in lines:
        dim, stored = name.split(", ")
        for kernel, cell in zip(kernels, cells, strict=True):
            row = only(
                rows, system="trainmark", kernel=kernel, dim=int(dim), tables_precision=stored,
                indices="power_law", launch="default",
            )  # fmt: skip
            ms, floor = cell.removesuffix(")").split(" (")
            assert_rounded(ms, row["ms"])
            assert_rounded(floor, row["floor_ms"])


def test_the_parts_of_a_step() -> None:
    first = read_rows("dlrm_gpu_h200")[0]
    split, kernels = first["split_ms"], first["kernels_ms"]
    small = split["copy"] + split["other"] + split["forward"] - kernels["_forward_kernel"]
    expected = {
        "MLPs": split["mlp"],
        "lookup and interaction": kernels["_forward_kernel"],
        "their backward pass": kernels["_backward_kernel"],
        "update of the rows": kernels["_update_kernel"],
        "sort of the next batch's ids": split["sort"],
        "copies and small kernels": small,
        "step": first["step_ms"],
    }
    shown = {line[0]: line[3].removesuffix(" ms") for line in table(PAGE, "part |")}
    assert shown.keys() == expected.keys()
    for part, ms in expected.items():
        assert_rounded(shown[part], ms)


# --- the README's table

UNITS = {"M": 1e6, "k": 1e3, "": 1.0}


def assert_shown(cell: str, value: float) -> None:
    """The number behind a cell's colon, or at its start, such as `FBGEMM: 8.66 M`."""
    found = re.match(r"([\d.,]+) ?([Mk]?)", cell.rpartition(": ")[2])
    assert found, cell
    assert_rounded(found[1].replace(",", ""), value / UNITS[found[2]])


def readme_rows() -> list[tuple[float, float]]:
    """Ours and the peer's, in the order of the table."""
    same = {"size": "small", "batch": 65536, "indices": "power_law", "source": "resident"}
    dlrm = [
        only(read_rows("dlrm_gpu_h200"), **same, **which)["samples_per_s"]
        for which in (
            {"system": "trainmark", "tables_precision": "fp32", "mlp_precision": "bf16"},
            {"system": "trainmark", "tables_precision": "fp32", "mlp_precision": "fp8"},
            {"system": "fbgemm"},
            {"system": "torchrec"},
        )
    ]
    cpu = [row["samples_per_s"] for row in read_rows("dlrm_cpu")[:3]]
    llama = [row["tokens_per_s"] for row in read_rows("llama3_gpu_h200")]
    bert = [
        only(read_rows("distilbert_gpu_h200"), precision="bf16", attention="masked", **which)
        for which in (
            {"system": "trainmark", "mode": "padded"},
            {"system": "huggingface-compiled"},
            {"system": "trainmark", "mode": "packed"},
        )
    ]
    padded, compiled, packed = (row["samples_per_s"] for row in bert)
    seconds = {
        engine: preparation(engine)["seconds"] for engine in ("embedded", "polars", "pandas")
    }
    return [
        (dlrm[0], dlrm[2]),
        (dlrm[0], dlrm[3]),
        (dlrm[1], dlrm[2]),
        (cpu[0], cpu[1]),
        (cpu[0], cpu[2]),
        (llama[0], llama[2]),
        (llama[1], llama[2]),
        (padded, compiled),
        (packed, 0.0),
        (seconds["embedded"], seconds["polars"]),
        (seconds["embedded"], seconds["pandas"]),
    ]


def test_the_readme() -> None:
    lines = table("README.md", "workload, hardware |")
    medians = [ratio["value"] for ratio in read_rows("dlrm_cpu")[0]["ratios"]]
    for (_, ours, peer, shown), (our_value, peer_value) in zip(lines, readme_rows(), strict=True):
        if ours:
            assert_shown(ours, our_value)
        if not peer:
            continue
        assert_shown(peer, peer_value)
        by_time = peer.endswith(" s")
        of_rounds = peer.startswith("PyTorch")
        ratio = peer_value / our_value if by_time else our_value / peer_value
        assert_rounded(shown.removesuffix(" x"), medians.pop(0) if of_rounds else ratio)
    assert not medians


def preparation(engine: str) -> dict[str, Any]:
    rows = [row for row in read_rows("prepare") if row["rows"] == 4_000_000]
    return only(rows, engine=engine, cores=2)


def test_peers_of_preparation() -> None:
    ours, engines = preparation("embedded"), ("embedded", "polars", "duckdb", "pandas")
    for engine, (_, seconds, ratio, processor, memory) in zip(
        engines, table(PREPARATION, "system | seconds"), strict=True
    ):
        row = preparation(engine)
        assert_rounded(seconds, row["seconds"])
        if ratio:
            assert_rounded(ratio, row["seconds"] / ours["seconds"])
        assert_rounded(processor, row["cpu_seconds"])
        assert_rounded(memory, row["peak_mb"] / 1000)


def test_cores_of_preparation() -> None:
    rows = read_rows("prepare_cores")
    large = [row for row in rows if row["kind"] == "criteo" and row["rows"] == 100_000_000]
    runs = [only(large, cores=cores, output="memory") for cores in (1, 2, 4, 8, 16)]
    runs.append(only(large, output="memory, again"))
    figures = [
        (
            run["seconds"],
            run["phase_seconds"]["parse"],
            run["phase_seconds"]["encode"],
            run["cpu_seconds"] / 100,
        )
        for run in runs
    ]
    lines = table(PREPARATION, "cores | 1 |")
    assert len(lines) == 4
    for (_, *cells), values in zip(lines, zip(*figures, strict=True), strict=True):
        for cell, value in zip(cells, values, strict=True):
            assert_rounded(cell, value)
    disk = only(large, output="disk")["seconds"]
    answers = [time.split()[0] for _, _, time in table(PREPARATION, "log | machine |")]
    for shown, value in zip(answers[1:3], (runs[4]["seconds"], disk), strict=True):
        assert_rounded(shown, value)


def test_cores_of_training() -> None:
    rows = read_rows("dlrm_cpu_cores")
    shapes, systems = {"narrow": "embeddings", "full-size": "full-size"}, ("pytorch", "trainmark")
    lines = table(PAGE, "network | system | 1 |")
    assert len(lines) == len(rows) / 5
    for network, system, *cells, times in lines:
        which = {"shape": shapes[network.split()[0]], "system": systems[system == "Trainmark"]}
        steps = [1000 * only(rows, **which, cores=n)["step_s"] for n in (1, 2, 4, 8, 16)]
        for shown, value in zip(cells, steps, strict=True):
            assert_rounded(shown, value)
        assert_rounded(times.removesuffix(" x"), steps[0] / steps[-1])
