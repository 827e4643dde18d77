"""Table values grouped by what their rows look like, so that a step handles a group with one kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from h3compile.engine.manifest import PortRecord
from h3compile.errors import EngineError
from h3compile.program.dims import evaluate_dim
from h3compile.program.serialize import parse_dtype

__all__ = ["TableGroup", "group_tables"]


@dataclass(frozen=True)
class TableGroup:
    """Table values of one dtype and of one shape ``[g, ...]`` a timestep.

    ``on_host``: its rows lie in host memory, and those of a step are brought to the device for it.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one timestep."""
        return len(self.names) * torch.Size(self.shape).numel() * self.dtype.itemsize


def group_tables(
    ports: Iterable[PortRecord], dim: str, on_host: Collection[str] = ()
) -> tuple[TableGroup, ...]:
    """Groups the ports of table values; ``dim`` is the dimension that counts timesteps.

    Those named ``on_host`` are grouped apart from the others.

    Raises `EngineError` for a value whose first dimension is not a multiple of it alone.
    """
    groups: dict[tuple[torch.dtype, tuple[int, ...], bool], list[str]] = {}
    for port in ports:
        try:
            one, two = ([evaluate_dim(size, {dim: count}) for size in port.shape] for count in (1, 2))
        except ValueError as error:
            raise EngineError(f"table {port.name} has another free length ({error})") from error
        if not one or two != [2 * one[0], *one[1:]]:
            raise EngineError(f"table {port.name} of shape {port.shape} is not row by row in {dim}")
        key = (parse_dtype(port.dtype), tuple(one), port.name in on_host)
        groups.setdefault(key, []).append(port.name)
    return tuple(TableGroup(tuple(names), *key) for key, names in groups.items())
