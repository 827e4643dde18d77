"""A prediction beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Figure:
    """One prediction beside one measurement, in ``unit``; ``bar`` is how far they may be apart."""

    group: str
    name: str
    unit: str
    predicted: float
    measured: float
    bar: float

    @property
    def off(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def fits(self) -> bool:
        """Whether both are as near as the bar asks for."""
        return abs(self.off) <= self.bar

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.group}: {self.name}"
