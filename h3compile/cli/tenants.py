"""Where the text encoder and the VAEs of a `run` live: as asked, or by what the engine leaves of the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

from h3compile.errors import H3CompileError, nearest
from h3compile.plan.components import COMPONENTS

if TYPE_CHECKING:
    import torch

    from h3compile.models.placing import Placement

__all__ = ["Asked", "asked_placement", "room"]

Asked = Literal["resident", "moved", "streamed"]

# What Diffusers calls them.
_NAMES = {"text_encoder": "text-encoder", "vae": "video-vae", "audio_vae": "audio-vae"}


def asked_placement(text: str | None) -> Asked | None:
    """``text`` where it names a placement that one process can do; `H3CompileError` for others."""
    if text == "elsewhere":
        raise H3CompileError(
            "`run` has no other place for text encoder and VAEs", "leave --components out: it takes what fits"
        )
    if text is None:
        return None
    for known in get_args(Asked):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise H3CompileError(f"components cannot be {text!r}", nearest(text, get_args(Asked)))


def room(device: torch.device, pixels: int, asked: Asked | None) -> Mapping[str, Placement]:
    """By component, the placement ``asked`` for, or the bytes that are left for its weights while it works.

    ``pixels`` are those of the whole clip. On a CPU they stay: there is one memory.
    """
    from h3compile.runtime.memory import free_bytes

    free = free_bytes(device)
    if free is None:
        return {}
    if asked is not None:
        return dict.fromkeys(_NAMES, asked)
    return {name: free - COMPONENTS[known].work_bytes(pixels) for name, known in _NAMES.items()}
