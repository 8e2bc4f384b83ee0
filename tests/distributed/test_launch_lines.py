"""What `trainmark launch` makes of its flags, and what it refuses: no rank is started here."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.unit.refusals import refused
from trainmark.cli import main
from trainmark.distributed import launch_jobs as jobs
from trainmark.distributed import launch_slurm as slurm
from trainmark.distributed import launch_torchrun as torchrun
from trainmark.distributed import launch_torchx as torchx
from trainmark.distributed.launch_options import LaunchOptions, Shape, endpoint
from trainmark.errors import InputError

RUN = ["train", "llama3-demo", "--checkpoint-every", "2 steps"]
SLURM = LaunchOptions(on="slurm", shape="2x8")
TORCHRUN = LaunchOptions(on="torchrun", shape="1x2")


# --- lines


def test_a_torchrun_line_is_one_that_torchrun_takes() -> None:
    from torch.distributed.run import get_args_parser

    words = torchrun.arguments(replace(TORCHRUN, max_restarts=3), Shape(1, 2), RUN)
    parsed = get_args_parser().parse_args(words)
    assert parsed.standalone
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("1", "2", 3)
    assert (parsed.module, parsed.training_script) == (True, "trainmark")
    assert parsed.training_script_args == RUN


def test_torchrun_on_several_machines_meets_at_the_given_place() -> None:
    from torch.distributed.run import get_args_parser

    options = replace(TORCHRUN, rendezvous="localhost:2345", max_restarts=1)
    words = torchrun.arguments(options, Shape(3, 2), RUN)
    parsed = get_args_parser().parse_args(words)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint) == ("c10d", "localhost:2345")
    assert not parsed.standalone
    assert parsed.local_addr is None  # the loopback's address is of no use to others
    assert torchrun.environment(options, words) == {
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    assert torchrun.interface_of("127.0.0.1") == "lo"
    assert torchrun.interface_of("203.0.113.9") is None
    assert endpoint("node7") == ("node7", 29500)


def test_numa_is_torchruns_own_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmark.hardware.backends.here", lambda: "cuda")
    words = torchrun.arguments(replace(TORCHRUN, numa=True), Shape(1, 2), RUN)
    assert words[words.index("--numa-binding") + 1] == "node"
    monkeypatch.setattr(torchrun, "_knows", lambda flag: False)  # as an older torchrun
    with pytest.raises(InputError, match="cannot bind"):
        torchrun.arguments(replace(TORCHRUN, numa=True), Shape(1, 2), RUN)
    assert "--shutdown-timeout" not in torchrun.arguments(TORCHRUN, Shape(1, 2), RUN)


def test_a_batch_script() -> None:
    options = replace(
        SLURM,
        sbatch=("partition=gpu", "exclusive", "cpus-per-task=96", "job-name=mine"),
        srun=("cpu-bind=none",),
        container="registry#trainmark:1",
        mounts=("/data:/data", "/a b:/c"),
        numa=True,
        max_restarts=2,
    )
    lines = slurm.script(options, Shape(2, 8), "llama3-demo", RUN).splitlines()
    assert lines[0] == "#!/bin/bash"
    head = [line for line in lines if line.startswith("#SBATCH ")]
    assert head == [
        "#SBATCH --job-name=mine",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=96",
        f"#SBATCH --output={Path.cwd() / 'runs/launch/slurm-%j.log'}",
        "#SBATCH --partition=gpu",
        "#SBATCH --exclusive",
    ]
    (first,) = [place for place, line in enumerate(lines) if line.startswith("srun ")]
    words = shlex.split(" ".join(lines[first : first + 2]).replace("\\", ""))
    assert words[: words.index("python")] == [
        "srun", "--kill-on-bad-exit=1", "--cpus-per-task=96",
        "--container-image=registry#trainmark:1", "--container-mounts=/data:/data,/a b:/c",
        "--cpu-bind=none",
    ]  # fmt: skip
    launcher = words[words.index("python") + 3 :]
    assert launcher[:9] == ["launch", "--on", "torchrun", "-j", "2x8", "--max-restarts", "2",
                            "--numa", "--rendezvous"]  # fmt: skip
    assert words[-len(RUN) :] == RUN


def test_a_script_for_one_node_needs_no_meeting_place() -> None:
    assert "--rendezvous" not in slurm.script(SLURM, Shape(1, 8), "demo", RUN)


def test_a_torchx_application() -> None:
    specs = pytest.importorskip("torchx.specs")
    options = LaunchOptions(
        on="torchx", shape="2x4", scheduler="slurm",
        sbatch=("partition=gpu", "gpus-per-node=4", "cpus-per-task=32"),
    )  # fmt: skip
    made = torchx.app(options, Shape(2, 4), "demo", ["train", "dlrm-demo", "--output", "$HOME/x"])
    (role,) = made.roles
    assert (role.num_replicas, role.resource.cpu, role.resource.gpu) == (2, 32, 4)
    assert torchx.scheduler_config(options)[0] == {"partition": "gpu"}
    filled = specs.macros.Values(img_root="", app_id="1", replica_id="0", rank0_env="FIRST").apply(
        role
    )
    line = filled.args[1]
    assert '--rendezvous "${FIRST}:29500" train dlrm-demo' in line
    assert line.endswith("'$HOME/x'")


# --- what is refused


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["needs its flags, then what to launch"]),
        (["predict", "DIR"], ["needs its flags, then what to launch", "Received: predict DIR"]),
        (["evaluate", "DIR"], ["Missing from trainmark launch: --on"]),
        (["--on", "kubernetes", "-j", "1x1", *RUN], ["'kubernetes'", "torchrun", "slurm"]),
        (["--on", "torchrun", *RUN], ["-j NODESxDEVICES", "(Machines and devices of each"]),
        (["-j", "1x1", *RUN], ["launch: --on {torchrun,torchx,slurm} (torchrun: this machine"]),
        (["--on", "torchrun", "-j", "1x2", *RUN, "--dry-run"], ["no launch: trainmark train"]),
        (["--on", "torchrun", "-j", "1x2", *RUN, "--cluster", "cpux1x2"], ["for --dry-run"]),
        (["--on", "torchrun", "-j", "1x2", "--jobs", "/dev/null", *RUN], ["is a file"]),
        (["--on", "torchrun", "-j", "8", *RUN], ["NODESxDEVICES", "'8'"]),
        (["--on", "torchrun", "-j", "0x8", *RUN], ["NODESxDEVICES", "'0x8'"]),
        (["--on", "torchrun", "-j", "2x8", *RUN], ["needs --rendezvous HOST"]),
        (["--on", "torchrun", "-j", "1x2", "train", "lama3-demo"], ["'llama3-demo'"]),
        (["--on", "torchrun", "-j", "1x2", *RUN, "--lrr", "1"], ["--lrr", "--lr?"]),
        (["--on", "torchrun", "-j", "1x2", "--sbatch", "a=b", *RUN], ["--sbatch is for"]),
        (["--on", "torchrun", "-j", "1x2", "--container", "x", *RUN], ["--on slurm"]),
        (["--on", "torchrun", "-j", "1x2", "--max-restarts", "-1", *RUN], ["negative"]),
        (
            ["--on", "torchrun", "-j", "1x2", "--max-restarts", "x", *RUN],
            ["--max-restarts must be a whole number. Received: 'x'."],
        ),
        (["--on", "torchrun", "-j", "2x1", "--rendezvous", "h:p", *RUN], ["HOST:PORT", "'h:p'"]),
        (["--on", "torchrun", "-j", "2x1", "--rendezvous", "h:65536", *RUN], ["at most 65535"]),
        (
            ["--on", "torchrun", "-j", "1x2", "--rendezvous", "h:1", *RUN],
            ["several machines meet, and -j 1x2 is one"],
        ),
        (["--on", "slurm", "-j", "1x1", "--sbatch", "nodes=3", *RUN], ["set by -j"]),
        (["--on", "slurm", "-j", "1x1", "--sbatch", "P=x", *RUN], ["partition=gpu", "'P=x'"]),
        (["--on", "slurm", "-j", "1x1", "--mounts", "/a:/b", *RUN], ["--container"]),
        (["--on", "slurm", "-j", "1x1", "--container", "x", "--mounts", "/a", *RUN], ["'/a'"]),
        (["--on", "slurm", "-j", "1x1", *RUN], ["no sbatch on this machine"]),
        (["status", "slurm-1"], ["no job 'slurm-1'", "runs/launch"]),
        (["logs", "../../etc/passwd"], ["no job"]),
        (["stop"], ["Missing from trainmark launch stop: HANDLE (What `launch --detach` printed)"]),
    ],
)
def test_wrong_words_end_in_one_sentence(
    words: list[str],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM here
    assert main(["launch", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("trainmark: ")
    assert len(printed.err.splitlines()) == 1
    for part in parts:
        assert part in printed.err
    assert not list(tmp_path.iterdir())


def test_several_misplaced_flags_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--on", "torchrun", "-j", "1x1", "--srun", "a", "--mounts", "a:b", "--sbatch", "c"]
    assert main(["launch", *flags, *RUN]) == 2
    assert capsys.readouterr().err.startswith("trainmark: 3 problems:\n")


def test_what_sbatch_refuses_is_told_when_torchx_submits_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torchx")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: gpuu' >&2\nexit 3\n")
    sbatch.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    flags = ["--on", "torchx", "--scheduler", "slurm", "-j", "1x2", "--sbatch", "partition=gpuu"]
    assert main(["launch", *flags, *RUN]) == 2
    reason, sentence = capfd.readouterr().err.splitlines()
    assert reason == "sbatch: error: invalid partition: gpuu"
    assert sentence == "trainmark: sbatch refused the job, with exit code 3 and the reason above."


# --- what a shell would run


@pytest.mark.parametrize("flags", [
    ["--jobs", "jobs\ntouch pwned\n"],
    ["--jobs", "jobs\r\ntouch pwned"],
    ["--jobs", "jobs\x0btouch pwned"],
    ["--sbatch", "comment=a\ntouch pwned"],
    ["--sbatch", "requeue\ntouch pwned"],
])  # fmt: skip
def test_a_comment_of_the_batch_script_stays_on_its_line(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    words = ["launch", "--on", "slurm", "-j", "1x2", "--dry-run", *flags, *RUN]
    refused(capsys, words, "An #SBATCH line holds one line" if "--jobs" in flags else "--sbatch")


@pytest.mark.parametrize(
    "text", ["$(touch pwned)", "`touch pwned`", "; touch pwned", "'; touch pwned; '"]
)
def test_words_stay_words_in_the_batch_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Run by bash, with programs that only say what they were given."""
    flags = ["--jobs", f"{tmp_path}/{text}", "--srun", f"comment={text}"]
    command = ["train", "dlrm-demo", "--output", text]
    assert main(["launch", "--on", "slurm", "-j", "1x2", "--dry-run", *flags, *command]) == 0
    script = tmp_path / "script.sh"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, text=True, capture_output=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert f"--comment={text}" in words
    assert words[-1] == text
    assert not (tmp_path / "pwned").exists()


# --- jobs


def test_a_process_that_is_gone_without_an_exit_code(tmp_path: Path) -> None:
    job = jobs.new("torchrun-1", "process", "999999999", [], [])
    assert jobs.state(tmp_path, job) == slurm.State("KILLED", 137)


def test_the_exit_code_of_a_process_is_kept(tmp_path: Path) -> None:
    job = jobs.start_process(tmp_path / "jobs", "torchrun", ["sh", "-c", "echo hello; exit 7"])
    with (tmp_path / "out").open("w") as output:
        assert jobs.follow(tmp_path / "jobs", job, output) == 7
    assert (tmp_path / "out").read_text() == "hello\n"
    assert jobs.find(tmp_path / "jobs", job.handle) == job
    assert jobs.state(tmp_path / "jobs", job) == slurm.State("FAILED", 7)


def test_a_clock_that_is_set_anew_kills_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil tells when a process began by the clock, and by when the machine was started."""
    job = jobs.start_process(tmp_path / "jobs", "torchrun", ["sleep", "60"])
    told = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: told(self) - 3600)
    assert jobs.state(tmp_path / "jobs", job) == slurm.State("RUNNING", None)
    jobs.stop(tmp_path / "jobs", job)


@pytest.mark.parametrize(
    ("name", "code", "signal_number", "expected"),
    [
        ("RUNNING", 0, 0, None),
        ("COMPLETING", 0, 0, None),
        ("COMPLETED", 0, 0, 0),
        ("FAILED", 2, 0, 2),
        ("FAILED", 0, 9, 137),
        ("TIMEOUT", 0, 0, 1),
        ("CANCELLED", 0, 15, 143),
    ],
)
def test_slurms_states(name: str, code: int, signal_number: int, expected: int | None) -> None:
    assert slurm._state(name, code, signal_number).exit_code == expected
