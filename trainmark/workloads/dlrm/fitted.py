"""Which settings of a run follow from its data, and which may differ between comparable runs."""

from trainmark.config import TUNABLE
from trainmark.workloads.dlrm import auto
from trainmark.workloads.dlrm.runs import TERABYTE, DlrmRun, demo_schedule, dlrm_demo

_CLOSED = TUNABLE | {
    "last_batch", "stop_at_target", "best_auc", "synthetic_rows", "synthetic_ids", "sharding",
    "page_cache",
}  # fmt: skip


def closed(cfg: DlrmRun) -> frozenset[str]:
    """Top-level fields that may change while a result stays comparable with the named run's."""
    # The demo's tables are those of whatever log was prepared for it.
    own = {"model", "target"} if cfg.name in ("dlrm-demo", auto.NAME) else set()
    # A planted log's quality cannot be compared with that of the real one.
    planted_log = {"data"} if cfg.data == TERABYTE else set()
    return (_CLOSED | own | fitted_fields(cfg) | auto.unchosen(cfg)) - planted_log


def fitted_fields(cfg: DlrmRun) -> frozenset[str]:
    """Top-level fields that nobody chose, and that may be others when a run goes on: `resolve` fits
    them to the log and the epochs. Only the demo and dlrm-auto have a schedule among them; the
    published runs keep theirs."""
    if cfg.name == auto.NAME:
        return frozenset({"dataset"}) | (
            auto.unchosen(cfg) & {"auto_rows", "schedule", "schedule_steps"}
        )
    if cfg.name != "dlrm-demo":
        return frozenset({"dataset"})
    unchosen = [dlrm_demo().schedule]
    if cfg.schedule_steps is not None:
        unchosen.append(demo_schedule(cfg.schedule_steps))
    fitted = cfg.schedule in unchosen
    return frozenset({"dataset", "schedule", "schedule_steps"} if fitted else {"dataset"})
