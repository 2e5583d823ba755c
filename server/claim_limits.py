"""What the operator lets a client claim of itself: set on its token, or on the client later."""

from __future__ import annotations

from dataclasses import dataclass

from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.grid import MAX_BITS


class LimitError(ValueError):
    """A limit under which no client could take part."""


@dataclass(frozen=True)
class ClaimLimits:
    """Above these, what a client says of itself does not count."""

    max_samples: int | None = None
    """None: what it claims, within the run's `max_samples` and `share_limit`."""
    max_budget: float | None = None
    """In bits per weight. None: what it claims."""

    def __post_init__(self) -> None:
        if self.max_samples is not None and self.max_samples < MIN_SAMPLES:
            raise LimitError(
                f"nobody trains on {self.max_samples} samples; the limit must be {MIN_SAMPLES} or more"
            )
        if self.max_budget is not None and not 1 <= self.max_budget <= MAX_BITS:
            raise LimitError(f"a limit of {self.max_budget:g} bits per weight is outside 1..{MAX_BITS}")

    def samples(self, claimed: int) -> int:
        return claimed if self.max_samples is None else min(claimed, self.max_samples)

    def budget(self, claimed: float) -> float:
        return claimed if self.max_budget is None else min(claimed, self.max_budget)

    def __str__(self) -> str:
        samples = "" if self.max_samples is None else f"{self.max_samples:,} samples"
        budget = "" if self.max_budget is None else f"{self.max_budget:g} bits per weight"
        return ", ".join(part for part in (samples, budget) if part)


UNLIMITED = ClaimLimits()
