"""What a forward returns, and the configuration a caller may read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

__all__ = ["FrozenConfig", "TransformerOutput"]

ConfigValue = int | float | tuple[int, ...]


@dataclass(frozen=True)
class TransformerOutput:
    """Velocities in row order: ``sample`` and ``audio_sample``, each [1, rows, channels].

    Readable by attribute, by field name and by position, like the output object of Diffusers.
    """

    sample: torch.Tensor
    audio_sample: torch.Tensor

    def to_tuple(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors, in order."""
        return (self.sample, self.audio_sample)

    def __getitem__(self, key: int | str) -> torch.Tensor:
        if isinstance(key, int):
            return self.to_tuple()[key]
        return {"sample": self.sample, "audio_sample": self.audio_sample}[key]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.to_tuple())

    def __len__(self) -> int:
        return 2


class FrozenConfig(Mapping[str, ConfigValue]):
    """The model's configuration, by attribute or by item; it cannot be changed."""

    _values: Mapping[str, ConfigValue]

    def __init__(self, values: Mapping[str, ConfigValue]) -> None:
        # Into the dictionary and not by assignment, which this class refuses.
        self.__dict__["_values"] = dict(values)

    def __getitem__(self, name: str) -> ConfigValue:
        return self._values[name]

    def __getattr__(self, name: str) -> ConfigValue:
        # Reached only for what is no attribute; copies and pickles ask before there are values.
        values: Mapping[str, ConfigValue] = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"the model's configuration has no {name!r}")
        return values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an engine's configuration cannot be changed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"FrozenConfig({dict(self)})"
