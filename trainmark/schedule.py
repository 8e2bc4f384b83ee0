"""Learning-rate schedules: warm-up, then a polynomial, linear or cosine decay, then constant."""

import math
from dataclasses import dataclass
from typing import Literal

from trainmark.bounds import CountOrNone, Part, Positive


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The shape of the learning rate over optimiser steps, as a factor of the peak `lr`."""

    warmup_steps: CountOrNone = 0
    """Steps over which the rate rises linearly to its peak."""
    decay_start: CountOrNone | None = None
    """Step at which the decay begins; None keeps the peak until the end."""
    decay_steps: CountOrNone = 0
    """Steps that the decay takes."""
    decay: Literal["polynomial", "cosine"] = "polynomial"
    """Form of the decay."""
    decay_power: Positive = 2.0
    """Exponent of the polynomial decay (1 is linear)."""
    end_factor: Part = 0.0
    """Factor that the decay ends at, and that every later step keeps."""
    first_step: Literal[0, 1] = 0
    """What the first step counts as: 0 in NVIDIA's TensorFlow DLRM, 1 in its PyTorch one."""

    def factor(self, step: int) -> float:
        """The factor for optimiser step `step`, where the first one is 0 whatever `first_step`."""
        count = step + self.first_step
        if count < self.warmup_steps:
            return count / self.warmup_steps
        if self.decay_start is None or count <= self.decay_start:
            return 1.0
        if count >= self.decay_start + self.decay_steps:
            return self.end_factor
        left = (self.decay_start + self.decay_steps - count) / self.decay_steps
        if self.decay == "cosine":
            shape = 0.5 * (1.0 - math.cos(math.pi * left))
            return self.end_factor + (1.0 - self.end_factor) * shape
        return max(math.pow(left, self.decay_power), self.end_factor)

    def problems(self) -> list[str]:
        """What is wrong with these numbers, a sentence each."""
        found = []
        if self.decay_start is None and self.decay_steps > 0:
            found.append("schedule.decay_steps needs schedule.decay_start.")
        if self.decay_start is not None:
            if self.decay_start < self.warmup_steps:
                found.append(
                    f"schedule.decay_start ({self.decay_start}) must not come before the end of "
                    f"the warm-up ({self.warmup_steps} steps)."
                )
            if self.decay_steps == 0:
                found.append("schedule.decay_start needs schedule.decay_steps above 0.")
        return found
