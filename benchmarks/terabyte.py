"""The published DLRM runs on the planted Terabyte, whole epochs, each by a command of its own.

    PYTHONPATH=. python benchmarks/terabyte.py --rows small large       (an H200: 4 minutes a row)

prints each command and runs it; --list prints them all. What they found is gathered from the
folders of the runs into `results/terabyte_h200.json`, beside the published rows; a row gives way to
a newer one. docs/terabyte.md tells what the data are.

    PYTHONPATH=. python benchmarks/terabyte.py --pairs

compares the precisions in that folder: the differences of their AUCs on all test rows, with the
standard errors of paired differences, which belong to the rows, too.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, SCHEMA
from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.metrics.ranking import Z95, Estimate
from trainmark.report import published
from trainmark.report.paired import difference_of, other_rows
from trainmark.run.assessment import read_scores

RESULT = RESULTS / "terabyte_h200.json"
WHOLE = "--evals-per-epoch 20"
PAIRED = "--evals-per-epoch 0 --keep-scores 100000000"  # one evaluation, of all test rows
PART = "--evals-per-epoch 0 --max-steps 4578"  # 300 M samples
COMMON = "--data terabyte --no-stop-at-target --eval-batch 262144 --checkpoint-every never"
RUNS = {
    "small": f"dlrm-small {WHOLE}",
    "small-seed1": f"dlrm-small --seed 1 {WHOLE}",
    "small-seed2": f"dlrm-small --seed 2 {WHOLE}",
    "large": f"dlrm-large {WHOLE}",
    "xlarge": f"dlrm-xlarge --table-precision int8 {WHOLE}",
    "flagperf": f"dlrm-flagperf {WHOLE}",
    "small-tf32": f"dlrm-small --precision tf32 {PAIRED}",
    "small-bf16": f"dlrm-small --precision bf16 {PAIRED}",
    "small-fp8": f"dlrm-small --precision fp8 {PAIRED}",
    "small-tables-bf16": f"dlrm-small --precision bf16 --table-precision bf16 {PAIRED}",
    "small-tables-int8": f"dlrm-small --precision bf16 --table-precision int8 {PAIRED}",
    "mlperf": f"dlrm-mlperf {PART}",
    "mlperfx2": f"dlrm-mlperfx2 --table-precision bf16 {PART}",
    "full": f"dlrm-full --table-precision int8 {PART}",
}
# What a row is compared with. Tables of fewer bits stand beside MLPs in bf16, so that their
# difference to `small-bf16` is the tables' alone, and that to `small-tf32` is of both together.
PAIRS = {
    "small-bf16": ["small-tf32"],
    "small-fp8": ["small-tf32"],
    "small-tables-bf16": ["small-tf32", "small-bf16"],
    "small-tables-int8": ["small-tf32", "small-bf16"],
}
DIFFERENCES = "differences.json"


def command(name: str) -> str:
    """What a user would type."""
    return f"trainmark train {RUNS[name]} {COMMON}"


def row(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """What a run's result says."""
    quality, config = result["quality"], result["config"]
    held_out = {e["split"]: e["metrics"] for e in result["evaluations"]}  # the last of each
    return {
        "system": "trainmark",
        "name": name,
        "command": command(name),
        "run": result["run"],
        "precision": result["precision"],
        "tables_precision": config["table_format"]["table_precision"],
        "seed": config["seed"],
        "target": quality["target"],
        "reached": quality["reached"],
        "at_sample": quality["at_sample"],
        "time_to_target_s": quality["at_s"],
        "e2e_s": result["time_s"]["e2e"],
        "p_whole": result["throughput"]["p_whole"],
        "p_train": result["throughput"]["p_train"],
        "auc": quality["value"],
        "log_loss": held_out[quality["split"]]["log_loss"],
        "auc_validation": held_out.get("validation", {}).get("auc"),
        "samples": result["samples"],
        "curve": [
            [e["at_sample"], e["metrics"]["auc"]]
            for e in result["evaluations"]
            if e["split"] == quality["split"]
        ],
        "commit": result["software"]["commit"],
    }


def published_rows() -> list[dict[str, Any]]:
    """Of the same runs on one device, with a time to the target."""
    return [
        {
            "system": known.system,
            "run": known.run,
            "hardware": known.hardware,
            "precision": known.precision,
            "e2e_s": known.e2e_time_s,
            "auc": known.quality,
        }
        for run in dict.fromkeys(flags.split()[0] for flags in RUNS.values())
        for known in published.for_run(run)
        if known.case.endswith("x1x1") and known.e2e_time_s is not None
    ]


def compare(folder: Path, split: str = "test") -> None:
    """Write each row's differences to others into its folder, where both have scores."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, others in PAIRS.items():
        pairs = [(name, other) for other in others if _scored(folder, split, name, other)]
        if pairs:
            found = {b: _difference(folder, split, a, b, device) for a, b in pairs}
            write_atomically(folder / name / DIFFERENCES, json.dumps(found, indent=2) + "\n")


def _scored(folder: Path, split: str, *names: str) -> bool:
    return all((folder / name / "scores" / f"{split}.json").exists() for name in names)


def _difference(folder: Path, split: str, name: str, other: str, device: str) -> dict[str, Any]:
    """What `name` has more than `other`."""
    a, b = (read_scores(folder / run, split) for run in (other, name))
    if why := other_rows(a, b):
        raise InputError(f"{other} and {name} are not of the same rows: {why}.")
    found = difference_of(a, b, device)
    assert found.auc is not None
    return {
        "split": split,
        "rows": len(a.labels),
        "auc_difference": found.auc.value,
        "standard_error": _standard_error(found.auc),
        "log_loss_difference": found.log_loss.value,
        "log_loss_standard_error": _standard_error(found.log_loss),
    }


def _standard_error(found: Estimate) -> float | None:
    """That the interval was made from."""
    if found.low is None or found.high is None:
        return None
    return (found.high - found.low) / (2 * Z95)


def collect(folder: Path, commit: str | None) -> None:
    """Bring what lies in `folder` into the results."""
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    rows = {r["name"]: r for r in document["rows"] if r["system"] == "trainmark"}
    for name in RUNS:
        path = folder / name / "result.json"
        if path.exists():
            result = json.loads(path.read_text())
            found = row(name, result)
            if (folder / name / DIFFERENCES).exists():
                found["differences"] = json.loads((folder / name / DIFFERENCES).read_text())
            rows[name] = found | {"commit": found["commit"] or commit}
            hardware = {k: v for k, v in result["hardware"].items() if k != "monitor"}
            software = {k: v for k, v in result["software"].items() if k != "command"}
            document |= {"hardware": hardware, "software": software}
    ours = [rows[name] for name in RUNS if name in rows]
    document = {"schema": SCHEMA, "commit": commit, "command": "see each row"} | document
    document["rows"] = ours + published_rows()
    write_atomically(RESULT, json.dumps(document, indent=2) + "\n")
    owed = [name for name in RUNS if name not in rows]
    print(f"{RESULT}: {len(ours)} of {len(RUNS)} rows; owed: {', '.join(owed) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", choices=RUNS, default=[])
    parser.add_argument("--folder", type=Path, default=Path("runs/terabyte"))
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--list", action="store_true", help="print the commands only")
    parser.add_argument("--pairs", action="store_true", help="compare the runs' scores")
    given = parser.parse_args()
    for name in RUNS if given.list else given.rows:
        print(command(name), flush=True)
        if not given.list:
            words = shlex.split(command(name))[1:]
            output = ["--output", str(given.folder / name)]
            subprocess.run([sys.executable, "-m", "trainmark", *words, *output], check=False)
    if given.pairs:
        compare(given.folder)
    if not given.list:
        collect(given.folder, given.commit)


if __name__ == "__main__":
    main()
