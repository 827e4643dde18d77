"""The drop-in module: an engine behind the forward of Diffusers' MiniMax-H3 transformer."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NoReturn, TypeVar

import torch

from h3compile.engine.manifest import Manifest
from h3compile.errors import H3CompileError, Interrupted
from h3compile.program.residency import Residency
from h3compile.program.serialize import dtype_name, parse_dtype
from h3compile.runtime.forward import Forward
from h3compile.runtime.measures import MeasuredStep
from h3compile.runtime.parts import Parts
from h3compile.runtime.pool import Pool
from h3compile.runtime.ranks import Ranks
from h3compile.runtime.results import FrozenConfig, TransformerOutput
from h3compile.runtime.shortage import out_of_memory
from h3compile.runtime.stats import Stats
from h3compile.runtime.together import Together
from h3compile.runtime.validate import check_attention_kwargs

__all__ = ["CompiledTransformer"]

T = TypeVar("T")


class CompiledTransformer(torch.nn.Module):
    """A loaded engine, to be put in as ``pipe.transformer``.

    It owns no parameters and no gradients flow through it. One forward runs at a time: a second thread
    waits. `stop` may be called from another thread or from a signal handler.

    An engine built for several ranks is loaded on each of them, and called with the same inputs on each; or
    rank 0 is `leading` and the others `follow`.
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
        self._forward = Forward(parts)
        self._together = None if parts.ranks is None else Together(parts.ranks, parts, self._forward)

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

        Raises `H3CompileError` for inputs that do not fit and when the device has not the memory,
        `Interrupted` after `stop`. On several ranks `RankFailure` when another one failed: after that, and
        after an error in the midst of a forward, no forward will run any more.
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
        together = self._together
        with self._running():
            if together is None:
                sample, audio = self._guarded(
                    lambda: self._forward.run(self._forward.prepare(given), self._obey)
                )
            else:
                sample, audio = self._guarded(lambda: together.step(given, self._stopping, self._obey))
        return TransformerOutput(sample, audio) if return_dict else (sample, audio)

    def _guarded(self, step: Callable[[], T]) -> T:
        streams = self._parts.streamer is not None
        try:
            return step()
        except Interrupted:
            self._stopping = False  # also where another rank was asked
            raise
        except torch.cuda.OutOfMemoryError:
            refused = out_of_memory(self.stats, self._forward.rows, self.device, streams)
        # Out here nothing refers to the tensors of the forward that failed.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise refused

    @contextmanager
    def _running(self) -> Iterator[None]:
        device = self._parts.device
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with self._lock, current, torch.no_grad(), torch.autocast(device.type, enabled=False):
            try:
                yield
            except (Interrupted, KeyboardInterrupt):
                # Wherever it came: who interrupts wants no thread to read on. The next forward goes on.
                if self._parts.streamer is not None:
                    self._parts.streamer.reader.pause()
                raise

    # --- stopping ---

    def stop(self) -> None:
        """Makes the running forward raise `Interrupted` before its next call of a region.

        Between two forwards it makes the next one raise. Raising clears the request, so the forward after
        that runs; `resume` clears it without a forward. On a GPU at most a few blocks still complete.
        One of several ranks stops all of them, before the next forward.
        """
        self._stopping = True

    def resume(self) -> None:
        """Withdraws a `stop` that no forward has obeyed yet; call it when a new request begins."""
        self._stopping = False

    def _obey(self) -> None:
        ranks = self._parts.ranks
        if ranks is not None:  # they stop where they agree to, see `Together`
            ranks.watch.tick()
        elif self._stopping:
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
            self._forward.release()

    # --- several ranks ---

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that the engine runs on together; None for an engine of one rank."""
        return self._parts.ranks

    def leading(self) -> AbstractContextManager[None]:
        """While the block runs, ranks that `follow` compute every forward of this one, rank 0.

        It may do anything between its forwards: the others wait.
        """
        return nullcontext() if self._together is None else self._together.leading()

    def follow(self) -> int:
        """Computes every forward of rank 0 for as long as it is `leading`; how many there were.

        And has a part in what rank 0 says was `measured`.

        What rank 0 refuses or stops is refused or stopped here too, without an error. Raises `RankFailure`
        when rank 0, or another rank, failed or is gone.
        """
        if self._together is None:
            raise H3CompileError("an engine of one rank has nobody to follow", "call it")
        count = 0
        for step in self._together.following():
            with self._running():
                outcome = self._guarded(partial(step, self._stopping, self._obey))
            if isinstance(outcome, Interrupted):
                self._stopping = False
            count += isinstance(outcome, tuple)
        return count

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
    def residency(self) -> Residency | None:
        """Which blocks stay on the device, as built or as loaded; None: all, and no plan says so."""
        return self._parts.residency

    @property
    def pool(self) -> Pool:
        """What another load may share: ``load(path, share=module)``."""
        return self._parts.pool

    @property
    def stats(self) -> Stats:
        """Counters since loading and bytes held now."""
        parts = self._parts
        parts.stats.bytes_weights = parts.weights.nbytes
        parts.stats.bytes_sent = 0 if parts.ranks is None else parts.ranks.traffic.total
        parts.stats.bytes_host = parts.tables.host_nbytes if parts.tables is not None else 0
        if parts.streamer is not None:
            parts.stats.bytes_slots = parts.streamer.slot_bytes
            parts.stats.bytes_host += parts.streamer.reader.nbytes
            parts.stats.bytes_copied = parts.streamer.copied
        parts.stats.bytes_tables = parts.tables.nbytes if parts.tables is not None else 0
        parts.stats.bytes_request = parts.request.nbytes + parts.inputs.nbytes + parts.measures.nbytes
        return parts.stats

    def measured(self) -> tuple[MeasuredStep, ...]:
        """What the steps of the current request left for reports, the first one first.

        Empty for an engine that measures nothing. A request begins when the text, the positions or the
        layout of the rows change, or when a step is no less noisy than the one before it. The values are on
        the device and asking one rank for them does not wait for it.

        Several ranks add up what each counted, the tiles of its own heads, so that all have what one rank
        would: every rank must ask, after the same forwards, or rank 0 while it is `leading`. That takes one
        exchange, and no step takes any. Raises `H3CompileError` where a rank asks for something else,
        `RankFailure` where one does not come.
        """
        together = self._together
        if together is None:
            return self._parts.measures.steps
        with self._running():
            return together.measured()

    def extra_repr(self) -> str:
        text = f"{self._parts.manifest.model}, partition={self.partition!r}, device={str(self.device)!r}"
        return text if self.residency is None else f"{text}, {self.residency}"

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
