"""`train --from`: a new run begins with what another one has learned.

Its data may be those of the other run, or extend them (`prepare --vocabulary OLD --grow`). Then a
table's old rows come from the checkpoint, and the new rows behind them start afresh.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainmark import workloads
from trainmark.checkpoint import checkpoints, folders
from trainmark.checkpoint.local_shards import first_rows
from trainmark.checkpoint.run_tensors import is_of_trainer, own_name
from trainmark.config import Run, TrainOptions, filled
from trainmark.errors import InputError
from trainmark.formatting import counted
from trainmark.run.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    find_checkpoint,
    parse_config,
    read_config,
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a new run begins with."""

    path: Path
    """The checkpoint."""
    with_optimizer: bool = False
    grown: Mapping[str, int] = field(default_factory=dict)
    """For each table that has more rows by now, its rows in the checkpoint."""

    def __str__(self) -> str:
        taken = "weights and optimiser state" if self.with_optimizer else "weights"
        tables = counted(len(self.grown), "table")
        return f"{taken} of {self.path}" + (f", and new rows in {tables}" if self.grown else "")

    @property
    def identity(self) -> dict[str, Any]:
        """As checkpoints of the new run keep it."""
        return {"path": str(self.path.resolve()), "with_optimizer": self.with_optimizer}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors`, by their names in a checkpoint."""
        stored = set(checkpoints.names(self.path))
        missing = sorted(filter(is_of_trainer, tensors.keys() - stored))
        if missing:
            raise InputError(
                f"--with-optimizer: {self.path} was trained with another optimiser or precision; "
                f"it has no {missing[0]}. Train with the same, or leave --with-optimizer out."
            )
        wanted = {name: _as_before(name, tensor, self.grown) for name, tensor in tensors.items()}
        there = {name: tensor for name, tensor in wanted.items() if tensor is not None}
        checkpoints.load(self.path, there)


def find(options: TrainOptions, cfg: Run, output: Path) -> Start | None:
    """The start that was asked for. Refuses a checkpoint whose data do not match the run's.

    None where the run in `output` has begun with it already, and it is gone by now.
    """
    if options.weights_from is None:
        if options.with_optimizer:
            raise InputError("--with-optimizer needs --from RUN, whose optimiser state to take.")
        return None
    if not options.weights_from.exists() and _has_begun(output, options):
        return None
    path = find_checkpoint(options.weights_from)
    earlier = _earlier(path, cfg)
    if earlier is not None:
        workloads.definition(cfg).check_weights(cfg, earlier)
    return Start(path=path, with_optimizer=options.with_optimizer, grown=_grown(earlier, cfg))


def _has_begun(output: Path, options: TrainOptions) -> bool:
    """Whether the checkpoints in `output` are of a run that began as the options say."""
    latest = folders.latest(output / CHECKPOINTS)
    began = folders.read_state(latest).get("start") if latest else None
    return (
        began is not None
        and Path(began["path"]).is_relative_to(filled(options.weights_from).resolve())
        and began["with_optimizer"] == options.with_optimizer
    )


def like_the_earlier(options: TrainOptions, output: Path, cfg: Run) -> Run:
    """The unresolved run, with what its first weights decide: those that it continues from, or
    those of --from."""
    earlier = None
    if (output / CONFIG_FILE).is_file():
        earlier = read_config(output)
    elif options.weights_from is not None:
        earlier = _earlier(find_checkpoint(options.weights_from), cfg)
    if earlier is None or earlier.workload != cfg.workload:
        return cfg
    return workloads.definition(cfg).like_the_earlier(cfg, earlier)


def _earlier(checkpoint: Path, cfg: Run) -> Run | None:
    """The configuration of a checkpoint's run; None if it is of another workload."""
    config = folders.read_state(checkpoint).get("config")
    if not isinstance(config, dict) or config.get("workload") != cfg.workload:
        return None
    earlier: Run = parse_config(config, checkpoint)
    return earlier


def _grown(earlier: Run | None, cfg: Run) -> Mapping[str, int]:
    if cfg.data is None or earlier is None:
        return {}
    definition = workloads.definition(cfg)
    grown = definition.grown_tables(earlier, cfg.data)
    if not grown:
        definition.check_data(earlier, cfg.data)
    return grown


def _as_before(name: str, tensor: Tensor, grown: Mapping[str, int]) -> Tensor | None:
    """The rows that a table had; None if this rank holds none of them."""
    table = own_name(name).rpartition(".")[0]  # of tables.3.weight, tables.3.sum
    return first_rows(tensor, grown[table]) if table in grown else tensor
