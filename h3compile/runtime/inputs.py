"""A forward's tensors as the program declares them, and which of them changed since the last forward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from h3compile.engine.manifest import PortRecord
from h3compile.program.serialize import parse_dtype
from h3compile.runtime.memory import aligned, nbytes, same_bits

__all__ = ["Inputs"]


@dataclass
class _Kept:
    given: torch.Tensor  # a strong reference: as long as it is held, no other tensor is this object
    version: int | None
    value: torch.Tensor  # declared dtype and device, memory of its own


class Inputs:
    """Moves inputs to the device and dtype of their ports, and keeps those named ``kept``.

    A kept input that is the same tensor object as last time, not written to since, is unchanged without
    a look at its contents. Otherwise contents are compared with the kept copy, bit for bit: a tensor made
    under `torch.inference_mode` has no version that would tell of a write.
    """

    def __init__(self, ports: Sequence[PortRecord], kept: Collection[str], device: torch.device) -> None:
        self._ports = [(port.name, parse_dtype(port.dtype)) for port in ports]
        self._names = frozenset(kept)
        self._device = device
        self._kept: dict[str, _Kept] = {}
        self._changed: set[str] = set()

    @property
    def kept(self) -> frozenset[str]:
        """The names of the inputs that are kept."""
        return self._names

    @property
    def nbytes(self) -> int:
        """Bytes of the kept copies."""
        return nbytes(*(kept.value for kept in self._kept.values()))

    def take(self, given: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
        """The inputs ready for the program, and the kept ones that changed since `acknowledge`.

        A change is told again until it is acknowledged, so that no failure and no Ctrl-C between being
        told and acting on it can make a stale value pass for a fresh one.
        """
        values = {
            name: self._keep(name, given[name], dtype)
            if name in self._names
            else self._convert(given[name], dtype)
            for name, dtype in self._ports
        }
        return values, frozenset(self._changed)

    def acknowledge(self) -> None:
        """Everything that depends on what changed has been dropped."""
        self._changed.clear()

    def release(self) -> None:
        """Forgets the kept inputs; all count as changed next time."""
        self._kept.clear()

    def _convert(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return aligned(tensor.detach().to(self._device, dtype).contiguous())

    def _keep(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        version = None if tensor.is_inference() else tensor._version
        kept = self._kept.get(name)
        if kept is not None and kept.given is tensor and version is not None and kept.version == version:
            return kept.value
        value = self._convert(tensor, dtype)
        if kept is not None and same_bits(kept.value, value):
            self._kept[name] = _Kept(tensor, version, kept.value)
            return kept.value
        if value.data_ptr() == tensor.data_ptr():
            value = value.clone()
        self._changed.add(name)
        self._kept[name] = _Kept(tensor, version, value)
        return value
