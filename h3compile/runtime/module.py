"""The drop-in module: an engine behind the forward of Diffusers' MiniMax-H3 transformer."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch

from h3compile.engine.manifest import Manifest
from h3compile.errors import H3CompileError, Interrupted
from h3compile.program.conditions import Variant, choose, largest_sigma
from h3compile.program.serialize import dtype_name, parse_dtype
from h3compile.runtime.inputs import Inputs
from h3compile.runtime.measures import MeasuredStep, Measures
from h3compile.runtime.pool import Pool
from h3compile.runtime.request import RequestMemo
from h3compile.runtime.results import FrozenConfig, TransformerOutput
from h3compile.runtime.runner import Runner
from h3compile.runtime.stats import Stats
from h3compile.runtime.tables import ModulationTables
from h3compile.runtime.validate import (
    LAYOUT,
    check_attention_kwargs,
    check_layout,
    check_shapes,
    read_timesteps,
)
from h3compile.runtime.weights import Weights

__all__ = ["CompiledTransformer", "Parts"]

_TIMESTEPS = ("timestep", "timestep_indices")


@dataclass(frozen=True)
class Parts:
    """A loaded engine: what `CompiledTransformer` drives."""

    manifest: Manifest
    partition: str
    device: torch.device
    pool: Pool
    weights: Weights
    inputs: Inputs
    request: RequestMemo
    tables: ModulationTables | None  # None where no pass made tables
    variants: Mapping[str, tuple[Variant, ...]]
    measures: Measures
    runner: Runner
    stats: Stats


class CompiledTransformer(torch.nn.Module):
    """A loaded engine, to be put in as ``pipe.transformer``.

    It owns no parameters and no gradients flow through it. One forward runs at a time: a second thread
    waits. `stop` may be called from another thread or from a signal handler.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts
        self._config = FrozenConfig(parts.manifest.model_config_values)
        self._dtype = parse_dtype(parts.manifest.dtype)
        self._lock = threading.Lock()
        # A plain flag and no threading.Event: setting an Event takes a lock, on which a signal handler
        # that interrupts the same operation would wait for ever.
        self._stopping = False
        self._layout_checked = False
        self._timesteps: list[float] | None = None
        stages = parts.manifest.input_stages
        self._of_request = frozenset(name for name, stage in stages.items() if stage == "request")

    def forward(
        self,
        hidden_states: torch.Tensor,
        audio_hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        timestep_indices: torch.Tensor,
        token_tags: torch.Tensor,
        position_ids: torch.Tensor,
        video_indices: torch.Tensor,
        audio_indices: torch.Tensor,
        text_indices: torch.Tensor,
        attention_kwargs: Mapping[str, object] | None = None,
        return_dict: bool = True,
    ) -> TransformerOutput | tuple[torch.Tensor, torch.Tensor]:
        """The velocities of all video rows and all audio rows, as `TransformerOutput` or as a tuple.

        With S rows in the packed sequence, of which V video, A audio and T text, and M distinct timesteps:
        hidden_states [1, V, channels], audio_hidden_states [1, A, channels], encoder_hidden_states
        [1, T, channels], timestep [M] in [0, 1], timestep_indices and token_tags [S], position_ids [S, 3],
        and the row indices [V], [A], [T]. Tensors of another dtype or device are converted to what the
        program declares, as the model itself would do.

        Raises `H3CompileError` for inputs that do not fit, `Interrupted` after `stop`.
        """
        check_attention_kwargs(attention_kwargs)
        given = {
            "hidden_states": hidden_states,
            "audio_hidden_states": audio_hidden_states,
            "encoder_hidden_states": encoder_hidden_states,
            "timestep": timestep,
            "timestep_indices": timestep_indices,
            "token_tags": token_tags,
            "position_ids": position_ids,
            "video_indices": video_indices,
            "audio_indices": audio_indices,
            "text_indices": text_indices,
        }
        with self._running():
            sample, audio_sample = self._step(given)
        return TransformerOutput(sample, audio_sample) if return_dict else (sample, audio_sample)

    def _step(self, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._parts
        lengths = check_shapes(parts.manifest.inputs, parts.manifest.dims, given)
        values, changed = parts.inputs.take(given)
        self._forget(changed)
        parts.inputs.acknowledge()
        timesteps = self._check_contents(values)
        values.update(parts.request.values(values, self._obey))
        rows = {} if parts.tables is None else parts.tables.select(timesteps, self._obey)
        # Once a step and from what the host knows already: nothing waits for the device.
        sigma = largest_sigma(timesteps)
        stand_ins = choose(parts.variants, lengths, sigma)
        with parts.measures.step(sigma, stand_ins) as record:
            sample, audio_sample = parts.runner.run(
                values, rows, self._obey, stand_ins=stand_ins, record=record
            )
        parts.stats.forwards += 1
        return sample, audio_sample

    def _forget(self, changed: Collection[str]) -> None:
        """Drops everything that was concluded from inputs which changed."""
        self._parts.request.invalidate(changed)
        if not self._of_request.isdisjoint(changed):
            self._parts.measures.restart()
        if not set(LAYOUT).isdisjoint(changed):
            self._layout_checked = False
        if not set(_TIMESTEPS).isdisjoint(changed):
            self._timesteps = None

    def _check_contents(self, values: Mapping[str, torch.Tensor]) -> list[float]:
        """Looks at contents not checked yet; the timesteps as numbers."""
        if not self._layout_checked:
            check_layout(values)
            self._layout_checked = True
        if self._timesteps is None:
            self._timesteps = read_timesteps(*(values[name] for name in _TIMESTEPS))
        return self._timesteps

    @contextmanager
    def _running(self) -> Iterator[None]:
        device = self._parts.device
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with self._lock, current, torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield

    # --- stopping ---

    def stop(self) -> None:
        """Makes the running forward raise `Interrupted` before its next call of a region.

        Between two forwards it makes the next one raise. Raising clears the request, so the forward after
        that runs; `resume` clears it without a forward. On a GPU at most a few blocks still complete.
        """
        self._stopping = True

    def resume(self) -> None:
        """Withdraws a `stop` that no forward has obeyed yet; call it when a new request begins."""
        self._stopping = False

    def _obey(self) -> None:
        if self._stopping:
            self._stopping = False
            raise Interrupted("the forward was stopped")

    # --- schedules and memory ---

    def prepare(self, timesteps: Sequence[float]) -> None:
        """Evaluates the tables of timesteps not folded at build, in one pass over the cold weights.

        Optional: a forward does the same for its own timesteps, one pass a forward. Raises
        `H3CompileError` when they do not fit into the budget for tables, `Interrupted` after `stop`.
        """
        with self._running():
            if self._parts.tables is not None:
                self._parts.tables.prepare(timesteps, self._obey)

    def release(self) -> None:
        """Frees what is held for the current request; weights and tables stay."""
        with self._lock:
            self._parts.inputs.release()
            self._parts.request.release()
            self._parts.measures.restart()
            if self._parts.tables is not None:
                self._parts.tables.release()
            self._layout_checked = False
            self._timesteps = None

    # --- facts ---

    @property
    def device(self) -> torch.device:
        """Where the engine was loaded."""
        return self._parts.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the packed sequence."""
        return self._dtype

    @property
    def config(self) -> FrozenConfig:
        """The model's configuration, such as ``config.patch_size``."""
        return self._config

    @property
    def manifest(self) -> Manifest:
        """The engine's record of how it was built."""
        return self._parts.manifest

    @property
    def partition(self) -> str:
        """The set of weights that was loaded."""
        return self._parts.partition

    @property
    def pool(self) -> Pool:
        """What another load may share: ``load(path, share=module)``."""
        return self._parts.pool

    @property
    def stats(self) -> Stats:
        """Counters since loading and bytes held now."""
        parts = self._parts
        parts.stats.bytes_weights = parts.weights.nbytes
        parts.stats.bytes_tables = parts.tables.nbytes if parts.tables is not None else 0
        parts.stats.bytes_request = parts.request.nbytes + parts.inputs.nbytes + parts.measures.nbytes
        return parts.stats

    def measured(self) -> tuple[MeasuredStep, ...]:
        """What the steps of the current request left for reports, the first one first.

        Empty for an engine that measures nothing. A request begins when the text, the positions or the
        layout of the rows change, or when a step is no less noisy than the one before it. The values are on
        the device and asking for them does not wait for it.
        """
        return self._parts.measures.steps

    def extra_repr(self) -> str:
        return f"{self._parts.manifest.model}, partition={self.partition!r}, device={str(self.device)!r}"

    # --- what a module with parameters could do and an engine cannot ---

    def to(self, *args: object, **kwargs: object) -> CompiledTransformer:
        """This module, for its own device and dtype; `H3CompileError` for another."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[call-overload]
        # Types first: asking for the current CUDA device fails where there is none.
        if device is not None and (device.type != self.device.type or with_index(device) != self.device):
            raise H3CompileError(
                f"an engine stays on the device it was loaded on, {self.device}",
                f"load it there: h3compile.load(path, device={str(device)!r})",
            )
        if dtype is not None and dtype != self.dtype:
            raise H3CompileError(
                f"an engine keeps the dtype it was built in, {dtype_name(self.dtype)}",
                f"build one from a checkpoint in {dtype_name(dtype)}",
            )
        return self

    def cpu(self) -> CompiledTransformer:
        """As ``to("cpu")``."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> CompiledTransformer:
        """As ``to("cuda")``."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def _apply(self, fn: object, recurse: bool = True) -> NoReturn:
        # Behind half(), float(), to_empty() and the like, which would do nothing without saying so.
        raise H3CompileError("an engine cannot be converted", "build one in the dtype you want")


def with_index(device: torch.device) -> torch.device:
    """``device`` with its number: ``cuda`` is the current CUDA device."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def parameters() -> tuple[str, ...]:
    """The tensor parameters of `CompiledTransformer.forward`, which a program's inputs must be."""
    names = tuple(inspect.signature(CompiledTransformer.forward).parameters)
    return names[1 : names.index("attention_kwargs")]
