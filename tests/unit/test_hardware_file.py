"""`hardware.toml`: what it changes in plans and runs, and what is wrong with bad ones."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.docs.commands import ROOT
from tests.small import FLAGS, train
from tests.unit.without_torch import run_without_torch
from trainmark import workloads
from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.hardware import hardware_file, known, machine
from trainmark.hardware.devices import Cluster, Peak, Unknown, cpu_name, key_of, peak_flops
from trainmark.hardware.memory import card_bytes
from trainmark.run import result
from trainmark.verbs.plan import make_plan
from trainmark.workloads.dlrm.sizes import on_one_gpu

WHOLE = """
name = "Example X100"
key = "acme"
memory = {gib = 64, source = "A"}
bandwidth = {gb_s = 2000, source = "B"}
[peak]
bf16 = {tflops = 200, source = "C"}
[links]
node = {gb_s = 100, source = "D"}
host = {gb_s = 50, source = "E"}
"""
BYTES: list[machine.Used] = ["memory bandwidth", "reading rows"]
MEASURED = """
[measured]
source = "yesterday"
copy_gb_s = 40
gather_gb_s = {64 = 10, 256 = 20}
update_gb_s = {64 = 5}
node_gb_s = 3
gemm_tflops = {fp32 = {64 = 0.1, 1024 = 0.4}}
"""
OF_LAYERS = """
interaction_tflops = {8 = 0.01}
layer_tflops = {fp32 = {64 = 0.05, 1024 = 0.2}}
layer_us = {fp32 = {64 = 30, 1024 = 100}}
small_table_gb_s = {gather = {64 = 40}, adagrad = {64 = 7}}
step_us = 400
id_us = 0.2
"""
OF_ALL = MEASURED + OF_LAYERS
THREADS = "threads_us = 20\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "hardware.toml"
    path.write_text(text)
    return path


def cpu(folder: Path, more: str = MEASURED) -> Path:
    name = json.dumps(cpu_name())
    head = f'name = {name}\nkey = "cpu"\nmemory = {{gib = 8, source = "A"}}\n'
    return written(folder, head + more)


# --- what holds


def test_what_a_file_says_holds_in_its_block(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    with pytest.raises(InputError, match="Unknown hardware 'acme'"):
        Cluster.parse("acmex1x8")
    with hardware_file.described(path):
        cluster = Cluster.parse("acmex1x8")
        assert key_of("example x100") == "acme"
        assert peak_flops("acme", "bf16") == Peak(200e12, "bf16", "C")
        assert isinstance(peak_flops("acme", "fp8"), Unknown)
        assert card_bytes(cluster) == 64 * 2**30
        found = machine.machine(cluster)
        assert (found.bandwidth, found.node_link, found.host_link) == (2000e9, 100e9, 50e9)
        assert machine.sources(cluster, "bf16", ["peak", *BYTES, "link between devices"]) == [
            "peak: C",
            "memory bandwidth: B",
            "link between devices: D",
        ]
        with pytest.raises(InputError, match="network between nodes of acmex2x8 is not known"):
            machine.machine(Cluster.parse("acmex2x8"))
    assert key_of("example x100") == "example-x100"
    assert isinstance(peak_flops("acme", "bf16"), Unknown)


def test_what_a_file_leaves_out_is_the_datasheets(tmp_path: Path) -> None:
    text = 'name = "NVIDIA H200"\n[links]\nnetwork = {gb_s = 12, source = "our switch"}\n'
    with hardware_file.described(written(tmp_path, text)) as found:
        assert found
        assert found.key == "h200"
        own = machine.machine(Cluster.parse("h200x2x8"))
        assert isinstance(peak_flops("h200", "fp8"), Peak)
    sheet = machine.machine(Cluster.parse("h200x2x8"))
    assert own.network == 12e9
    assert (own.bandwidth, own.node_link) == (sheet.bandwidth, sheet.node_link)


def test_a_file_reads_what_it_writes(tmp_path: Path) -> None:
    found = hardware_file.read(written(tmp_path, WHOLE + OF_ALL))
    again = hardware_file.read(written(tmp_path, hardware_file.text(found)))
    assert again == found
    odd = 'name = "a \\"quoted\\" \\u007f name"\nkey = "odd"\n'
    found = hardware_file.read(written(tmp_path, odd))
    assert hardware_file.read(written(tmp_path, hardware_file.text(found))) == found


def test_a_file_of_an_earlier_calibration_is_read(tmp_path: Path) -> None:
    found, earlier = (hardware_file.read(cpu(tmp_path, MEASURED + more)) for more in ("", THREADS))
    assert earlier == found


def test_ranks_of_a_machine_share_its_cpus(tmp_path: Path) -> None:
    with hardware_file.described(cpu(tmp_path, OF_ALL)):
        one, four = (machine.machine(Cluster.parse(f"cpux1x{ranks}")) for ranks in (1, 4))
        assert isinstance(peak_flops("cpu", "fp32"), Unknown)
    peak = '[peak]\nfp32 = {tflops = 1, source = "by hand"}\n'
    with hardware_file.described(cpu(tmp_path, peak)):
        assert machine.peak_of(Cluster.parse("cpux2x4"), "fp32") == Peak(0.25e12, "fp32", "by hand")
    assert four.measured.copy == pytest.approx(one.streaming(0.5) / 4)
    assert four.of_rows("gather", 64, 1e12, 0.5) == pytest.approx(10e9 / 4)
    assert four.measured.matmul("fp32", 64) == pytest.approx(0.1e12 / 4)
    assert four.measured.layer["fp32"][64] == pytest.approx(0.05e12 / 4)
    assert four.measured.layer_s == one.measured.layer_s
    assert (four.measured.id_s, four.measured.step_s) == pytest.approx((0.8e-6, 400e-6))
    assert (one.memory or 0) // 4 == four.memory
    assert four.node_link == one.node_link == pytest.approx(3e9 / 0.75)
    assert one.unknown == four.unknown == ""


def test_rates_between_measured_widths_lie_on_a_line_in_logarithms() -> None:
    rates = {64: 1e9, 256: 3e9, 4096: 4e9}
    for width in (1, 64, 100, 256, 1000, 4096, 9999):
        straight = np.interp(math.log(width), np.log([*rates]), np.log([*rates.values()]))
        assert known.between(rates, width) == pytest.approx(math.exp(straight))
    assert known.between({}, 64) is None


def test_rates_of_rows_depend_on_the_size_of_a_table(tmp_path: Path) -> None:
    measured = hardware_file.read(cpu(tmp_path, OF_ALL)).measured
    small, large = known.SMALL_TABLE, known.LARGE_TABLE
    between = math.sqrt(small * large)
    found = [measured.of_rows("gather", 64, size) for size in (1, small, between, large, 1e12)]
    assert found == pytest.approx([40e9, 40e9, 20e9, 10e9, 10e9])
    # Of Adagrad only small tables were measured, and of SGD only large ones.
    assert measured.of_rows("adagrad", 64, 1) == measured.of_rows("sgd", 64, 1) == 5e9


# --- plans


def test_a_plan_of_a_cpu_is_made_of_its_measured_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small run: B 512, D 8, tables of 50, 7 and 3 rows, MLPs 13-16-8 and 16-16-1."""
    assert main(["plan", "dlrm-demo", *FLAGS, "--hardware", str(cpu(tmp_path))]) == 0
    out = capsys.readouterr().out
    # All narrower than 64, where rates fall with the width of a square of the same intensity; dot
    # products, whose rate is not in the file, are those of a matrix of sqrt(4 x 8) columns.
    # The last layer is read four times.
    layers = sum(m * n / (2 * m * n / (m + n)) for m, n in ((13, 16), (16, 8), (16, 16)))
    products, last = 64 * (layers + 6 * 8 / 32**0.5), 4 * 16 * 4 / 40e9
    gather = 3 * 512 * (64 + 32) / 10e9
    (row,) = re.findall(r"^ 0 .*", out, re.M)
    shown = [float(cell) for cell in row.split()[-4:]]  # gather, products, update, step
    assert shown[0] == pytest.approx(1e3 * gather, abs=0.006)
    assert shown[1] == pytest.approx(1e3 * 512 * (6 * products / 0.1e12 + last), abs=0.006)
    assert "from: GEMMs, reading rows, updating rows: yesterday." in out
    assert "/8 " in row  # GiB
    # Layers that learn, where they were measured, go before GEMMs.
    assert main(["plan", "dlrm-demo", *FLAGS, "--hardware", str(cpu(tmp_path, OF_ALL))]) == 0
    out = capsys.readouterr().out
    (row,) = re.findall(r"^ 0 .*", out, re.M)
    shown = [float(cell) for cell in row.split()[-5:-2]]  # products, passes, starts
    products = 64 * layers / 0.05e12 + 6 * 8 / 0.01e12
    assert shown == pytest.approx(
        [1e3 * 512 * (6 * products + last), 512 * 3 * 0.2e-3, 0.4 + 4 * 0.03], abs=0.006
    )
    assert "from: layers, reading rows, updating rows: yesterday." in out
    words = ["plan", "dlrm-demo", *FLAGS, "--precision", "bf16"]
    assert main([*words, "--hardware", str(cpu(tmp_path))]) == 0
    assert (
        "No time is predicted: GEMMs were measured in fp32, not in bf16" in capsys.readouterr().out
    )


def test_a_plan_of_a_described_accelerator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(written(tmp_path, WHOLE))
    assert main(["plan", "llama3-1b", "--hardware", file, "--cluster", "acmex1x2"]) == 0
    out = capsys.readouterr().out
    assert "of acme nothing was measured" in out
    assert "MFU" in out
    gemms = '[measured]\nsource = "today"\ngemm_tflops = {bf16 = {2048 = 100}}\n'
    file = str(written(tmp_path, WHOLE + gemms))
    assert main(["plan", "llama3-1b", "--hardware", file, "--cluster", "acmex1x2"]) == 0
    assert "GEMMs of today" in capsys.readouterr().out
    assert main(["show", "llama3-1b", "--hardware", file]) == 0
    assert "llama3-1b on acmex1x1" in capsys.readouterr().out
    words = ["train", "llama3-1b", "--dry-run", "--hardware", file, "--cluster", "acmex1x2"]
    assert main(words) == 0
    assert "acmex1x2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dlrm-small"], "Taken from: peak: C; memory bandwidth: yesterday."),
        (["dlrm-small", "--host-tables", "0"],
         "Taken from: peak: C; memory bandwidth, reading rows, updating rows: yesterday; link to "
         "the host: E."),
        (["distilbert-sst2"], "Taken from: peak: C; memory bandwidth: yesterday."),
    ],
)  # fmt: skip
def test_a_plan_names_the_figures_that_it_used(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(written(tmp_path, WHOLE + MEASURED))
    more = ["--precision", "bf16", "--hardware", file, "--cluster", "acmex1x1"]
    assert main(["plan", *words, *more]) == 0
    assert sentence in capsys.readouterr().out


def test_the_link_to_the_host_is_asked_for_where_tables_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of peak, bandwidth and memory alone."""
    file = str(written(tmp_path, WHOLE.partition("[links]")[0]))
    more = ["--precision", "bf16", "--hardware", file, "--cluster", "acmex1x1"]
    for run in ("distilbert-sst2", "dlrm-small", "llama3-1b"):
        assert main(["plan", run, *more]) == 0
        assert "Predicted, not measured" in capsys.readouterr().out
    assert main(["plan", "dlrm-small", "--host-tables", "0", *more]) == 0
    assert (
        "No time is predicted: the link to the host of 'acme' is not known (trainmark calibrate "
        "measures it)."
    ) in capsys.readouterr().out


def test_a_plan_says_which_shares_it_took(tmp_path: Path) -> None:
    def constants(cluster: str) -> set[str]:
        run = dataclasses.replace(workloads.named_run("distilbert-sst2"), data="synthetic",
                                  precision="fp32")  # fmt: skip
        parsed = Cluster.parse(cluster)
        return set(make_plan(run, parsed).constants)

    assert constants("h100x1x1") == {"matmul of peak", "copy of bandwidth"}
    assert constants("h100x1x8") == constants("h100x1x1") | {"collective of link"}
    with hardware_file.described(written(tmp_path, WHOLE + MEASURED)):
        assert constants("acmex1x8") == set()


def test_one_gpu_is_one_whatever_its_key(tmp_path: Path) -> None:
    run = dataclasses.replace(workloads.named_run("dlrm-small"), data="synthetic", precision="bf16")
    with hardware_file.described(written(tmp_path, WHOLE.replace("acme", "box1x"))):
        for cluster, is_one in (("box1xx1x1", True), ("box1xx1x2", False), ("cpux1x1", False)):
            assert on_one_gpu(workloads.resolve(run, Cluster.parse(cluster))) is is_one


def test_plans_with_files_need_no_torch(tmp_path: Path) -> None:
    words = ["plan", "dlrm-small", "--hardware", str(written(tmp_path, WHOLE))]
    assert "Predicted, not measured" in run_without_torch([*words, "--precision", "bf16"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name = ", "cannot be read"),
        ("", "name is missing"),
        ('name = "X"\ncolour = 1', "colour is not a known key"),
        ('name = "X"\nmemory = {gib = 0, source = "A"}', "memory.gib must be above 0"),
        ('name = "X"\nmemory = {gib = 1}', "memory.source is missing"),
        ('name = "X"\nbandwidth = {gb_s = inf, source = "A"}', "must be a finite number"),
        ('name = "X"\n[peak]\nbf61 = {tflops = 1, source = "A"}', "peak.bf61: input should be"),
        ('name = "X"\npeak.bf16 = 3', "peak.bf16 must be a table of fields. Received: 3."),
        ('name = "X"\nkey = "A B"', "key must be small letters and digits"),
        ('name = "X"\nkey = "h100"', "key 'h100' is that of another device than 'X'"),
        ('name = "X"\n[measured]\ncopy_gb_s = 1', "measured.source is missing"),
        (
            'name = "X"\n[measured]\nsource = "A"\ngather_gb_s = {wide = 1}',
            "measured.gather_gb_s.wide",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_bad_file_is_one_sentence(
    verb: str, text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    words = [verb, "dlrm-demo", *FLAGS, "--hardware", str(path)]
    assert main([*words, *(["--output", str(tmp_path / "run")] if verb == "train" else [])]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert str(path) in told
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dlrm-demo", "--hardware", str(tmp_path / "none.toml")]) == 2
    assert "none.toml does not exist." in capsys.readouterr().err


# --- runs


def test_a_run_takes_its_peak_and_its_rates_from_a_file(tmp_path: Path) -> None:
    peak = '[peak]\nfp32 = {tflops = 0.5, source = "by hand"}\n'
    file = cpu(tmp_path, peak + MEASURED)
    assert train(tmp_path / "run", "--hardware", str(file)) == 0
    found = result.read(tmp_path / "run")
    (mfu,) = found.mfu
    assert (mfu.peak_flops, mfu.peak_source) == (0.5e12, "by hand")
    assert found.predicted is not None
    assert [source.split(": ")[1] for source in found.predicted.sources] == ["yesterday"]
    assert found.predicted.step_s == pytest.approx(sum(found.predicted.parts.values()))
    assert found.predicted.p_train == pytest.approx(512 / (found.predicted.step_s or 1))


def test_a_run_refuses_a_file_of_another_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, WHOLE)
    assert train(tmp_path / "run", "--hardware", str(file)) == 2
    told = capsys.readouterr().err
    assert "--hardware describes 'Example X100' (key acme), and this device is" in told
    assert not (tmp_path / "run").exists()


def test_the_files_of_the_docs_are_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        hardware_file.read(written(tmp_path, block))
