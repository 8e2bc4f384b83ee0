"""A trace of some steps, for a look at what the device does in them."""

from pathlib import Path

import torch

from trainmark.config import parse_profile


class Profiler:
    """Traces the steps START:STOP with torch.profiler into `profile.json`."""

    def __init__(self, steps: str | None, output: Path) -> None:
        self._steps = parse_profile(steps) if steps else range(0)
        self._path = output / "profile.json"
        self._profile: torch.profiler.profile | None = None
        if self._steps and self._steps.start == 0:
            self._begin()

    def step_done(self, step: int) -> None:
        if self._steps and step == self._steps.start:
            self._begin()
        elif self._steps and step == self._steps.stop:
            self.stop()

    def _begin(self) -> None:
        self._profile = torch.profiler.profile()
        self._profile.start()

    def stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
