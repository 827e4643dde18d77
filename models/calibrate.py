"""Calibration: what magnitudes the inputs of linears reach on requests of the user's."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from h3compile.errors import H3CompileError
from h3compile.models.checkpoint import PipelineFolder, find_checkpoint, open_partition
from h3compile.models.generate import denoise, load_pipeline
from h3compile.models.h3 import UNQUANTIZED_MODULES
from h3compile.models.request import Request
from h3compile.program.calibration import Calibration
from h3compile.progress import Progress, Silent

__all__ = ["calibrate", "quantizable"]

# A model, the linears to watch in it, and what runs it: the maximum of each.
_Collect: TypeAlias = Callable[[nn.Module, Collection[str], Callable[[nn.Module], None]], dict[str, float]]


def calibrate(
    model: PipelineFolder | Path | str,
    requests: Sequence[Request],
    *,
    partition: str = "transformer",
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Denoise ``requests`` with Diffusers' transformer and return the largest input of every linear.

    Args:
        model: a checkpoint, or what `find_checkpoint` takes. All of the pipeline must be there and fit on
            the device, the transformer in the dtypes it is stored in.
        requests: of tasks of ``partition``; each runs to its last forward, and nothing is decoded.
        device: where to run; None is the current CUDA device, or the CPU where there is none.
        progress: told of the components, and of the phases and notes of every request.

    Raises:
        H3CompileError: ModelOpt is missing; there is no request, or one that cannot run or not on this
            partition; an input was not finite, or zero throughout.
        CheckpointError: the checkpoint cannot be read.
    """
    report = progress or Silent()
    place = _device(device)
    resolved = _resolved(requests, partition, report)
    folder = model if isinstance(model, PipelineFolder) else find_checkpoint(str(model))
    open_partition(folder, partition)
    # Before the gigabytes: it may be missing.
    collect = _load_modelopt(report)
    pipe = load_pipeline(folder.root, from_checkpoint=(partition,), device=place, progress=report)
    transformer: nn.Module = getattr(pipe, partition)

    def forward_loop(_: nn.Module) -> None:
        for number, request in enumerate(resolved, 1):
            report.note(f"request {number} of {len(resolved)}: {request.summary}")
            denoise(pipe, request, progress=report)

    found = collect(transformer, quantizable(transformer), forward_loop)
    return Calibration({f"{linear}.weight": maximum for linear, maximum in found.items()}, partition)


def quantizable(model: nn.Module) -> tuple[str, ...]:
    """The names of the linears of ``model`` that the pass ``fp8`` quantizes, in the order of the model."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not any(f".{kept}." in f".{name}." for kept in UNQUANTIZED_MODULES)
    )


def _resolved(requests: Sequence[Request], partition: str, report: Progress) -> list[Request]:
    if not requests:
        raise H3CompileError("there is no request to calibrate with", "give a prompt")
    resolved = [request.resolve() for request in requests]
    for request, _ in resolved:
        if request.partition != partition:
            raise H3CompileError(
                f"{request.task} runs on {request.partition}, and {partition} is to be calibrated",
                "calibrate transformer_ref with references, and transformer without",
            )
    for note in dict.fromkeys(note for _, notes in resolved for note in notes):
        report.note(note)
    return [request for request, _ in resolved]


def _device(asked: torch.device | str | None) -> torch.device:
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise H3CompileError(f"{asked!r} is not a device", "name one such as 'cpu' or 'cuda:0'") from None
    if device.type not in ("cpu", "cuda"):
        raise H3CompileError(f"{device} cannot run the transformer", "name one such as 'cpu' or 'cuda:0'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise H3CompileError(f"{device} is not there, of {count} CUDA devices", "name another device")
    return device


def _load_modelopt(report: Progress) -> _Collect:
    report.phase("loading ModelOpt", None)
    try:
        with _quiet_import():
            from h3compile.models.input_maxima import input_maxima
    except ImportError as error:
        raise H3CompileError(
            f"NVIDIA ModelOpt cannot be imported ({error})", "pip install 'h3compile[calibrate]'"
        ) from error
    return input_maxima


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Drop what ModelOpt and torch say of the versions of others, and of a CUDA that is not there."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
