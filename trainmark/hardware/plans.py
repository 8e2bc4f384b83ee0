"""What a run takes of a cluster, before it is started: memory, time, and what the time goes to.

Every workload's `plan.py` fills a `Plan` in; `plan` and `show` print it, and results keep what it
predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainmark.hardware.memory import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all devices do in a step."""

    amount: int
    unit: str
    """Unit of the amount: samples, sentences, tokens."""
    flops: float
    convention: str
    """How these are counted, for an MFU."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a run on a cluster before it is started."""

    memory: Sequence[MemoryPlan]
    """Memory of each device; one plan if they are all alike."""
    host_bytes: Sequence[int] = ()
    """Bytes that each device keeps in its host's memory."""
    seconds: Sequence[Mapping[str, float]] = ()
    """Seconds of a step and of its parts on each device; empty where they are not known."""
    no_time: str | None = None
    """Why no time is predicted, where it is not."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds of a step on the device that the others wait for, by part."""
    off: tuple[float, float] | None = None
    """The shortest and the longest step expected, in parts of the predicted one."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """The resource that bounds each part: compute, memory bandwidth, the link, the host."""
    work: Work | None = None
    """What a step does in that time."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Shares and rates that the times were computed with."""
    sources: Sequence[str] = ()
    """Where these, and the device's own figures, come from."""
    tables: Sequence[Mapping[str, str]] = ()
    """Where each embedding table lies: rows of cells by their headers."""
    sentences: Sequence[str] = ()
    too_large: str | None = None
    """The message for a run that does not fit."""
    placement: str | None = None
    """The placement of tables as JSON, for `--json`."""

    @property
    def step_s(self) -> float | None:
        """The predicted step of the slowest device."""
        return max((parts["step"] for parts in self.seconds), default=None)

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The shortest and the longest step expected; None where nothing tells."""
        if self.step_s is None or self.off is None:
            return None
        low, high = self.off
        return self.step_s * low, self.step_s * high

    @property
    def bound_by(self) -> str | None:
        """The resource that most of the step goes to, with the parts that use it."""
        by_resource: dict[str, list[str]] = {}
        for part in sorted(self.parts, key=lambda part: -self.parts[part]):
            by_resource.setdefault(self.resources.get(part, part), []).append(part)
        if not by_resource:
            return None
        most = max(by_resource, key=lambda one: sum(self.parts[part] for part in by_resource[one]))
        parts = [part for part in by_resource[most] if self.parts[part] > 0]
        return most if parts == [most] else f"{most} ({', '.join(parts)})"
