"""Where the text encoder and the VAEs are while they do not work: they share a device with the transformer.

What streams a module a layer at a time is Diffusers' group offloading. What moves one whole is an accelerate
hook, as `enable_model_cpu_offload` has them; ours leaves when the transformer begins, which has no such hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.hooks import apply_group_offloading
from torch import nn

__all__ = ["Placement", "Placing", "current", "shorten", "vacate"]

# ``resident``: on the device always; ``moved``: there while it works; ``streamed``: a layer at a time.
# A number: moved if its weights take no more bytes, else streamed.
Placement = Literal["resident", "moved", "streamed"] | int


class Placing:
    """Puts components where ``placements`` says, by their names; those it does not name are resident.

    A module that Diffusers cannot stream, the audio VAE, is moved. Weights that leave the device keep their
    place in host memory: nothing is copied back.
    """

    def __init__(self, placements: Mapping[str, Placement], device: torch.device | str) -> None:
        self._placements = placements
        self._device = torch.device(device)
        self._moved: list[_Moved] = []

    def put(self, name: str, component: object) -> None:
        """Put ``component`` there if it is a module, which must be on the CPU."""
        if not isinstance(component, nn.Module):
            return
        placement = self._placements.get(name, "resident")
        if isinstance(placement, int):
            placement = "moved" if _nbytes(component) <= placement else "streamed"
        if placement == "resident":
            component.to(self._device)
        elif placement == "streamed" and getattr(component, "_supports_group_offloading", True):
            _stream(component, self._device)
        else:
            self._moved.append(_Moved(component, self._device, self._moved))


def shorten(text_encoder: nn.Module, layer: int) -> None:
    """Drops what no one reads of Qwen3-VL where its hidden state ``layer`` conditions the transformer.

    Of 64 layers 51 are kept: the one above the state is the last, whose own output is normalized. With the
    head, which is dropped too, that is 14 of 66.7 GB.
    """
    model: Any = text_encoder
    stack = model.model.language_model
    if layer + 1 < len(stack.layers):
        del stack.layers[layer + 1 :]
        model.config.text_config.num_hidden_layers = layer + 1
    model.lm_head = nn.Identity()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one: group offloading waits for the streams of that one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def vacate(components: Mapping[str, object]) -> None:
    """Takes every module that is moved off its device: somebody else needs the memory."""
    for component in components.values():
        hook = getattr(component, "_hf_hook", None)
        if isinstance(hook, _Moved):
            hook.leave()


def _nbytes(module: nn.Module) -> int:
    return sum(value.nbytes for value in (*module.parameters(), *module.buffers()))


def _stream(module: nn.Module, device: torch.device) -> None:
    # The text encoder and the VAE are entered below their forward, where Diffusers would learn the order of
    # their layers: each copy is waited for. Pinned before they are needed they would take their size again.
    stream = device.type == "cuda"
    with current(device):
        apply_group_offloading(
            module,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=stream,
            low_cpu_mem_usage=stream,
        )


class _Moved(ModelHook):  # type: ignore[misc]
    """Brings its module before it works; the ``others`` leave first."""

    def __init__(self, module: nn.Module, device: torch.device, others: list[_Moved]) -> None:
        self.execution_device = device  # Diffusers asks for it by this name
        self._module = module
        self._others = others
        self._host: list[tuple[torch.Tensor, torch.Tensor]] = []
        add_hook_to_module(module, self)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for other in self._others:
            if other is not self:
                other.leave()
        if not self._host:
            self._host = [(value, value.data) for value in (*module.parameters(), *module.buffers())]
            for value, data in self._host:
                value.data = data.to(self.execution_device)
        return args, kwargs

    def leave(self) -> None:
        """Puts the weights back to where they are in host memory."""
        if not self._host:
            return
        for value, data in self._host:
            value.data = data
        self._host.clear()
        if self.execution_device.type == "cuda":
            torch.cuda.empty_cache()
