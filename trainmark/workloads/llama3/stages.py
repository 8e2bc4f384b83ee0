"""Which layers each stage of the pipeline has, and which stages each rank."""

from trainmark.workloads.llama3.runs import LlamaRun, axes_of, stages_per_rank


def num_stages(cfg: LlamaRun) -> int:
    return axes_of(cfg)["pp"] * stages_per_rank(cfg)


def layers_of_stages(layers: int, stages: int, head: float) -> list[range]:
    """Which layers each stage has, so that the slowest stage is as fast as can be.

    The last stage has the head besides, which costs as much as `head` layers.
    """
    if stages == 1:
        return [range(layers)]

    def slowest(on_last: int) -> float:
        return max(-(-(layers - on_last) // (stages - 1)), on_last + head)

    last = min(range(1, layers - stages + 2), key=lambda n: (slowest(n), -n))
    each, longer = divmod(layers - last, stages - 1)
    counts = [each + (index < longer) for index in range(stages - 1)] + [last]
    ends = [sum(counts[: index + 1]) for index in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def layers_of(cfg: LlamaRun) -> list[range]:
    """The layers of each stage of a resolved run."""
    return layers_of_stages(
        cfg.model.layers, num_stages(cfg), cfg.model.head_in_layers(cfg.sequence)
    )


def stages_of(cfg: LlamaRun, pp_rank: int) -> range:
    """The stages of one pipeline rank."""
    return range(pp_rank, num_stages(cfg), axes_of(cfg)["pp"])
