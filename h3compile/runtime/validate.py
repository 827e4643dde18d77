"""What a forward refuses, each with its own line, before anything runs.

Shapes are compared on every forward and cost nothing. Contents are looked at only when they changed,
because reading them waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from h3compile.engine.manifest import DimRecord, PortRecord
from h3compile.errors import H3CompileError
from h3compile.program.serialize import dtype_name, parse_dtype
from h3compile.runtime.timesteps import to_bits

__all__ = ["LAYOUT", "check_attention_kwargs", "check_layout", "check_shapes", "read_timesteps"]

# The kinds of row in the packed sequence, in the order of their tags.
_KINDS = ("video", "text", "audio")
_INDICES = tuple(f"{kind}_indices" for kind in _KINDS)

# Inputs that `check_layout` reads.
LAYOUT = (*_INDICES, "token_tags")


def check_attention_kwargs(kwargs: Mapping[str, object] | None) -> None:
    """Refuses a LoRA scale other than 1, and anything else that would be ignored."""
    for name, value in (kwargs or {}).items():
        if name != "scale":
            raise H3CompileError(f"attention_kwargs[{name!r}] has no effect on an engine", "leave it out")
        if value is not None and value != 1:
            raise H3CompileError(
                f"attention_kwargs['scale'] is {value}, and an engine has no LoRA that it could scale",
                "leave it out or pass 1.0",
            )


def check_shapes(
    ports: Sequence[PortRecord], dims: Mapping[str, DimRecord], given: Mapping[str, object]
) -> dict[str, int]:
    """The free lengths by name, once ranks, widths and row counts are what the ports and each other say.

    ``dims`` gives the legal range of every length by its name.
    """
    lengths: dict[str, tuple[int, str]] = {}
    for port in ports:
        tensor = given[port.name]
        if not isinstance(tensor, torch.Tensor):
            raise H3CompileError(f"{port.name} is a {type(tensor).__name__}", "pass a torch.Tensor")
        if tensor.dim() != len(port.shape):
            shape = ", ".join(map(str, port.shape))
            raise H3CompileError(f"{port.name} has {tensor.dim()} dimensions", f"its shape is [{shape}]")
        if not parse_dtype(port.dtype).is_floating_point and tensor.is_floating_point():
            raise H3CompileError(f"{port.name} is {dtype_name(tensor.dtype)}", f"pass it as {port.dtype}")
        for place, (size, declared) in enumerate(zip(tensor.shape, port.shape, strict=True)):
            if isinstance(declared, str):
                _check_length(port.name, size, declared, dims, lengths)
            elif size != declared and place == 0:
                raise H3CompileError(
                    f"{port.name} holds {size} requests, a forward takes {declared}", "call once for each"
                )
            elif size != declared:
                raise H3CompileError(
                    f"{port.name} is {size} wide, the engine takes {declared}",
                    "it comes from another model or another packing",
                )
    _check_sum(lengths, given)
    return {name: length for name, (length, _) in lengths.items()}


def check_layout(values: Mapping[str, torch.Tensor]) -> None:
    """Refuses row indices and tags out of range, and rows named twice. Waits for the device once."""
    rows = values["token_tags"].shape[0]
    named = torch.cat([values[name] for name in _INDICES]).sort().values
    extremes = [extreme for name in LAYOUT for extreme in values[name].aminmax()]
    repeated = (named[1:] == named[:-1]).sum()
    *numbers, repeats = torch.stack([*extremes, repeated]).tolist()
    for name, low, high in zip(LAYOUT, numbers[::2], numbers[1::2], strict=True):
        limit = len(_KINDS) if name == "token_tags" else rows
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            mend = f"legal are 0 to {limit - 1}"
            if name == "token_tags" and low < 0:
                mend = "leave padding rows out, the engine takes any number of rows"
            raise H3CompileError(f"{name} holds {wrong}", mend)
    if repeats:
        raise H3CompileError(
            f"{', '.join(_INDICES)} name {repeats} rows twice", "every row is video, text or audio"
        )


def read_timesteps(timestep: torch.Tensor, indices: torch.Tensor) -> list[float]:
    """The timesteps as numbers. Refuses those outside [0, 1], and indices that name none of them.

    Waits for the device once.
    """
    extremes = torch.stack(list(indices.aminmax()))
    *timesteps, low, high = torch.cat([timestep.double(), extremes.double()]).tolist()
    if low < 0 or high >= len(timesteps):
        wrong = int(low if low < 0 else high)
        raise H3CompileError(
            f"timestep_indices holds {wrong} and timestep has {len(timesteps)} values",
            f"legal are 0 to {len(timesteps) - 1}",
        )
    to_bits(timesteps)  # for its refusals, which engines without tables need too
    return timesteps


def _check_length(
    name: str, size: int, dim: str, dims: Mapping[str, DimRecord], lengths: dict[str, tuple[int, str]]
) -> None:
    legal = dims[dim]
    if size < legal.smallest:
        raise H3CompileError(f"{name} has {size} {_words(dim)}", f"at least {legal.smallest} must be there")
    if size > legal.largest:
        raise H3CompileError(f"{name} has {size} {_words(dim)}", f"the engine takes at most {legal.largest}")
    known, first = lengths.setdefault(dim, (size, name))
    if known != size:
        raise H3CompileError(
            f"{name} has {size} {_words(dim)} and {first} has {known}", "they describe the same rows"
        )


def _check_sum(lengths: Mapping[str, tuple[int, str]], given: Mapping[str, object]) -> None:
    counts = {}
    for kind, name in zip(_KINDS, _INDICES, strict=True):
        tensor = given[name]
        assert isinstance(tensor, torch.Tensor)
        counts[kind] = tensor.shape[0]
    tags = given["token_tags"]
    assert isinstance(tags, torch.Tensor)
    if sum(counts.values()) != tags.shape[0]:
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise H3CompileError(
            f"{listed} rows make {sum(counts.values())}, the sequence has {tags.shape[0]}",
            "every row is video, text or audio",
        )


def _words(dim: str) -> str:
    return dim.replace("_", " ")
