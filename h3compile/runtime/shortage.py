"""What a user is told when the device ran out of memory: the plan beside the reality."""

from __future__ import annotations

import torch

from h3compile.errors import H3CompileError
from h3compile.runtime.memory import gib
from h3compile.runtime.stats import Stats

__all__ = ["out_of_memory"]


def out_of_memory(stats: Stats, rows: int, device: torch.device, streams: bool) -> H3CompileError:
    """The error of a forward of ``rows`` rows that found no memory; to be made while its tensors live."""
    planned = {"weights": stats.bytes_weights, "slots": stats.bytes_slots, "tables": stats.bytes_tables}
    planned["activations"] = stats.bytes_activations
    parts = ", ".join(f"{gib(size)} of {kind}" for kind, size in planned.items() if size)
    cause = f"{device} ran out of memory in a forward of {rows:,} rows: the engine needs {parts}"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        others = total - free - torch.cuda.memory_reserved(device)
        cause += (
            f"; this process had allocated {gib(allocated)} of {gib(total)}, {gib(free)} were free,"
            f" others and the driver held {gib(others)}"
        )
    fewer = "keep fewer blocks on it" if streams else "stream blocks through it"
    return H3CompileError(
        cause, f"{fewer} with h3compile.load(path, resident=N), free it, or ask for a smaller or shorter clip"
    )
