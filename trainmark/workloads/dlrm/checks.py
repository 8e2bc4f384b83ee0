"""What is wrong with a DLRM's settings, told before anything is allocated."""

import re

from trainmark.config import SYNTHETIC
from trainmark.errors import unknown
from trainmark.hardware.devices import Cluster, lacks
from trainmark.workloads.dlrm.crosses import cross_features
from trainmark.workloads.dlrm.runs import DlrmRun, Model, is_generated
from trainmark.workloads.dlrm.sizes import in_other_formats

PLACEMENTS = ("auto", "round_robin", "memory_balanced", "memory_optimized", "greedy")
MAX_PARAMETERS = 2**58  # bytes are counted in 64 bits
MAX_PLANTED = 1000  # features: 65,536 rows at a time are made in memory


def model_problems(cfg: DlrmRun, cluster: Cluster) -> list[str]:
    """What is wrong with the network, its tables, and their placement on a cluster."""
    return [
        *_network_problems(cfg),
        *_sharding_problems(cfg),
        *_format_problems(cfg, cluster),
        *_width_problems(cfg),
        *_interaction_problems(cfg.model),
        *_hotness_problems(cfg),
        *_cross_problems(cfg),
    ]


def _network_problems(cfg: DlrmRun) -> list[str]:
    model, problems = cfg.model, []
    if cfg.optimizer.eps is None:
        problems.append("optimizer.eps must be a number; None is for dlrm-auto to choose it.")
    if model.dropout is None:
        problems.append("model.dropout must be a number; None is for dlrm-auto to choose it.")
    if cfg.model.interaction == "auto":
        problems.append("model.interaction must be one; auto is for dlrm-auto to choose it.")
    if not model.bottom_mlp or model.bottom_mlp[-1] != model.embedding_dim:
        problems.append(
            f"The last width of model.bottom_mlp must equal model.embedding_dim "
            f"({model.embedding_dim}). Received: {model.bottom_mlp}. Change one of them, or leave "
            "model.bottom_mlp out: the named run's own follows model.embedding_dim."
        )
    if not model.top_mlp or model.top_mlp[-1] != 1:
        problems.append(f"The last width of model.top_mlp must be 1. Received: {model.top_mlp}.")
    if model.dropout and not _has_hidden_layers(model):
        problems.append(
            "model.dropout is for what hidden layers pass on, and this network has none. Give it "
            "some (--model.top-mlp 64 32 1), or take model.interaction_dropout."
        )
    if not problems and model.table_parameters + model.dense_parameters > MAX_PARAMETERS:
        problems.append(
            f"The model has {model.table_parameters + model.dense_parameters:.2g} parameters; "
            "no machine can count that far. Check model.table_rows and the widths."
        )
    if cfg.data == SYNTHETIC and cfg.synthetic_ids == "planted" and _features(model) > MAX_PLANTED:
        problems.append(
            f"Planted rows have at most {MAX_PLANTED:,} features. Received: {_features(model):,}. "
            "Ask for fewer, or for --synthetic-ids uniform."
        )
    decay = cfg.optimizer.weight_decay
    if decay * cfg.lr >= 1:
        problems.append(
            f"lr {cfg.lr} times optimizer.weight_decay {decay} is the share that a step takes off "
            "the weights: it must be below 1. Lower one of them."
        )
    return problems


def _has_hidden_layers(model: Model) -> bool:
    branches = (model.branch1_mlp, model.branch2_mlp) if model.interaction == "projection" else ()
    mlps = (model.bottom_mlp, model.top_mlp, *branches)
    return any(mlp is None or len(mlp) > 1 for mlp in mlps)  # a branch has one by default


def _features(model: Model) -> int:
    return model.numerical_features + len(model.table_rows)


def _sharding_problems(cfg: DlrmRun) -> list[str]:
    sharding, tables = cfg.sharding, len(cfg.model.table_rows)
    problems = []
    if sharding.placement not in PLACEMENTS and not sharding.placement.endswith(".json"):
        error = unknown("placement", sharding.placement, PLACEMENTS)
        problems.append(f"{error} Or give a .json file that 'trainmark plan --json' wrote.")
    problems += [
        f"host_tables: table {table} does not exist; the tables are 0 to {tables - 1}."
        for table in sharding.host_tables
        if not 0 <= table < tables
    ]
    if sharding.engine == "torchrec":
        problems += _torchrec_problems(cfg)
    return problems


def _torchrec_problems(cfg: DlrmRun) -> list[str]:
    sharding = cfg.sharding
    problems = [
        f"{name} is for --engine native: TorchRec's engine has no such tables. Leave it out."
        for name in ("host_tables", "data_parallel_threshold")
        if getattr(sharding, name)
    ]
    if sharding.column_slice_threshold and sharding.placement == "auto":
        problems.append(
            "column_slice_threshold does nothing with --engine torchrec --placement auto, which is "
            "TorchRec's own planner. Choose another placement, or leave it out."
        )
    if cfg.check_every:
        problems.append(
            "check_every is for --engine native: TorchRec's engine reads a batch once. Leave one "
            "of them out."
        )
    if cfg.optimizer.weight_decay:
        problems.append(
            "optimizer.weight_decay is for --engine native: TorchRec's engine decays no rows. "
            f"Received: {cfg.optimizer.weight_decay}. Leave one of them out."
        )
    return problems


def _width_problems(cfg: DlrmRun) -> list[str]:
    """What is wrong with tables that are narrower than others."""
    model, chosen = cfg.model, cfg.model.table_widths
    if chosen is None:
        return []
    if chosen != "auto":
        found = f"Received: {' '.join(map(str, chosen))}."
        if len(chosen) != len(model.table_rows):
            return [
                f"model.table_widths must have a width for each of the {len(model.table_rows)} "
                f"tables. {found}"
            ]
        if not all(1 <= width <= model.embedding_dim for width in chosen):
            return [
                "model.table_widths must lie between 1 and model.embedding_dim "
                f"({model.embedding_dim}). {found}"
            ]
    if min(model.table_rows, default=1) < 1 or not model.has_narrow_tables:
        return []
    sharding = cfg.sharding
    reasons = {
        "--engine torchrec": sharding.engine == "torchrec",
        f"--table-precision {cfg.table_format.table_precision}": in_other_formats(cfg),
        f"--placement {sharding.placement}": sharding.placement.endswith(".json"),
        "--column-slice-threshold": sharding.column_slice_threshold is not None,
        "--data-parallel-threshold": sharding.data_parallel_threshold is not None,
    }
    return [
        "Tables of several widths are fp32, and lie whole on one device each, in this version. "
        f"Received: model.table_widths with {reason}. Leave one of them out."
        for reason, is_so in reasons.items()
        if is_so
    ]


def _interaction_problems(model: Model) -> list[str]:
    chosen, width = model.interaction, model.joined_width
    owners = {"cross_layers": "dcn", "cross_rank": "dcn"}
    owners |= {"branch1_mlp": "projection", "branch2_mlp": "projection"}
    problems = [
        f"model.{name} is for --model.interaction {owner}. Received: {getattr(model, name)} with "
        f"interaction {chosen}. Leave it out, or choose {owner}."
        for name, owner in owners.items()
        if getattr(model, name) is not None and chosen != owner
    ]
    rank = model.cross_rank
    if chosen == "dcn" and isinstance(rank, int) and rank > width:
        problems.append(
            f"model.cross_rank must not exceed the width of the cross network, {width} "
            f"({len(model.table_rows)} tables and the bottom MLP, of {model.embedding_dim} each). "
            f"Received: {rank}. Lower it, or ask for --model.cross-rank full."
        )
    for name in ("branch1_mlp", "branch2_mlp") if chosen == "projection" else ():
        own = getattr(model, name)
        if own is not None and (not own or own[-1] % model.embedding_dim):
            problems.append(
                f"The last width of model.{name} must be a multiple of model.embedding_dim "
                f"({model.embedding_dim}). Received: {own}."
            )
    return problems


def _hotness_problems(cfg: DlrmRun) -> list[str]:
    """What is wrong with several ids per feature."""
    model, problems = cfg.model, []
    features = len(model.feature_rows)
    has_own = cfg.data is not None and not is_generated(cfg.data)  # a dataset, which was compared
    if model.hotness is not None and not has_own and len(model.hotness) != features:
        problems.append(
            f"model.hotness must have a number for each of the {features} tables. "
            f"Received: {len(model.hotness)} numbers, {' '.join(map(str, model.hotness))}."
        )
    if model.has_bags and is_generated(cfg.data) and cfg.multi_hot == "data":
        problems.append(
            f"--data {cfg.data} has one id of each feature. Received: model.hotness "
            f"{' '.join(map(str, model.bag_sizes))}. Give --multi-hot uniform, which makes several "
            "of one, or leave it out."
        )
    if model.has_bags and model.has_narrow_tables:
        problems.append(
            f"Tables of several widths are for one id of each feature; {_bags(cfg)} Leave "
            "--model.table-widths out, or prepare data without columns of lists."
        )
    return problems


def _bags(cfg: DlrmRun) -> str:
    sizes = " ".join(map(str, cfg.model.bag_sizes))
    return f"here, in the order of the features, a sample has up to {sizes} of them."


def _cross_problems(cfg: DlrmRun) -> list[str]:
    """What is wrong with combinations of features."""
    model = cfg.model
    if not model.crosses:
        return []
    received = f"Received: {' '.join(model.crosses)}."
    if model.has_bags:
        return [
            f"model.crosses are for one id of each feature; {_bags(cfg)} {received} Leave "
            "--model.crosses out, or prepare data without columns of lists."
        ]
    if is_generated(cfg.data):
        return [f"model.crosses are for a dataset of files. {received}"]
    last = len(model.feature_rows) - 1
    if not all(_is_cross(cross, last) for cross in model.crosses):
        return [
            f"model.crosses must each have two or more different features of 0 to {last}, with an "
            f"x between them. {received}"
        ]
    if len({frozenset(cross_features(cross)) for cross in model.crosses}) < len(model.crosses):
        return [f"model.crosses must be of different features each. {received}"]
    return []


def _is_cross(text: str, last: int) -> bool:
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})+", text):
        return False
    features = cross_features(text)
    return len(set(features)) == len(features) and max(features) <= last


def _format_problems(cfg: DlrmRun, cluster: Cluster) -> list[str]:
    chosen, tables = cfg.table_format, len(cfg.model.table_rows)
    problems = [
        f"fp32_tables: table {table} does not exist; the tables are 0 to {tables - 1}."
        for table in chosen.fp32_tables
        if not 0 <= table < tables
    ]
    if chosen.state_precision != "fp32" and (
        cfg.optimizer.name != "adagrad" or chosen.table_precision == "fp32"
    ):
        problems.append(
            "--state-precision is that of Adagrad's sums of squares of tables that are not fp32. "
            f"Received: {chosen.state_precision} with --optimizer.name {cfg.optimizer.name} and "
            f"--table-precision {chosen.table_precision}. Leave it out."
        )
    if not in_other_formats(cfg):
        return problems
    received = f"Received: --table-precision {chosen.table_precision}"
    if chosen.table_precision == "fp8" and lacks(cluster.hardware, "fp8"):
        problems.append(
            f"fp8 tables need a GPU that knows fp8 numbers, such as an H100. {received} on "
            f"{cluster}. Use int8."
        )
    if cfg.sharding.engine == "torchrec":
        problems.append(f"TorchRec's tables are fp32 here. {received}.")
    if cfg.optimizer.name == "adam":
        problems.append(
            f"Adam needs fp32 tables. {received}. Leave it out, or use --optimizer.name sgd, "
            "adagrad or rowwise_adagrad."
        )
    return problems
