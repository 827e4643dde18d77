"""Generation through Diffusers' components, with any module in the place of the transformer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3ModularPipeline, ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from torch import nn

from h3compile.errors import CheckpointError, H3CompileError, Interrupted
from h3compile.models.clip import Clip
from h3compile.models.h3 import PARTITIONS, dominant_dtype
from h3compile.models.media import Media, probe, read_image, read_sound, read_video
from h3compile.models.placing import Placement, Placing, current, shorten, vacate
from h3compile.models.quiet import quiet_libraries
from h3compile.models.request import FPS, SAMPLE_RATE, Request
from h3compile.program.source import ShardedTensors
from h3compile.progress import Progress, Silent

__all__ = ["denoise", "generate", "load_pipeline"]

# The conditioner samples a reference video at 2 fps in pairs: frames 0 and 12 must exist.
_MIN_REFERENCE_SECONDS = 13 / FPS


def load_pipeline(
    model: Path,
    *,
    transformer: nn.Module | None = None,
    transformer_ref: nn.Module | None = None,
    from_checkpoint: Collection[str] = (),
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    placements: Mapping[str, Placement] | None = None,
    progress: Progress | None = None,
) -> ModularPipeline:
    """Diffusers' pipeline around ``model``, with the given modules where its transformers would be.

    Args:
        model: a checkpoint in the published Diffusers layout.
        transformer, transformer_ref: the module for each partition, already on its device. `generate`
            refuses the tasks of a partition that is neither given nor in ``from_checkpoint``.
        from_checkpoint: partitions that Diffusers loads itself, in the dtypes they are stored in.
        device: where the other components go.
        dtype: of the other components; None leaves the conditioner as it is stored and the VAEs float32, as
            they are published.
        placements: by component, ``text_encoder``, ``vae`` or ``audio_vae``: ``moved`` to the device while it
            works, ``streamed`` there a layer at a time, or ``resident``, which they are unless said; a number
            means moved if its weights take no more bytes, else streamed.
        progress: told of each component.

    Raises:
        CheckpointError: the checkpoint is not in that layout, or a component of it cannot be loaded.
    """
    report = progress or Silent()
    given = {"transformer": transformer, "transformer_ref": transformer_ref}
    placing = Placing(placements or {}, device)
    with quiet_libraries():
        pipe = _open_index(model)
        names = [
            name
            for name in pipe.pretrained_component_names
            if name not in PARTITIONS or (given[name] is None and name in from_checkpoint)
        ]
        report.phase("loading components", len(names))
        for name in names:
            stored = _stored_dtype(model / name) if name in PARTITIONS else dtype
            component = _load_component(pipe, name, stored)
            if name == "text_encoder":
                shorten(component, pipe.text_encoder_layer)
            placing.put(name, component)
            pipe.update_components(**{name: component})
            report.advance()
        pipe.update_components(**{name: module for name, module in given.items() if module is not None})
    _silence_bars(pipe._blocks)
    return pipe


def generate(
    pipe: ModularPipeline,
    request: Request,
    *,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Clip:
    """Run ``request`` through ``pipe`` and return its pictures and sound.

    Args:
        pipe: from `load_pipeline`.
        request: resolved here again, so it may come as the user gave it.
        progress: told of the phases encode, denoise (one step a forward) and decode, and of the notes.
        should_stop: asked before every forward.

    Raises:
        H3CompileError: the request cannot run, or the pipeline has no module for its task.
        Interrupted: ``should_stop`` said so; the pipeline can be used again.
    """
    result = _run(pipe, request, progress or Silent(), should_stop, decode=True)
    return _clip(result["videos"][0], result["audio"][0], int(result["sampling_rate"]))


def denoise(pipe: ModularPipeline, request: Request, *, progress: Progress | None = None) -> None:
    """Run ``request`` through ``pipe`` to the end of its last forward, for those who watch the transformer.

    Arguments, phases and errors are those of `generate`, without the decoding.
    """
    with contextlib.suppress(_Denoised):
        _run(pipe, request, progress or Silent(), lambda: False, decode=False)


class _Denoised(Exception):
    """The last forward is done and nobody wants the clip."""


def _run(
    pipe: ModularPipeline,
    request: Request,
    report: Progress,
    should_stop: Callable[[], bool],
    *,
    decode: bool,
) -> dict[str, Any]:
    """What the pipeline gives for ``request``; without ``decode`` it ends in `_Denoised`."""
    request, notes = request.resolve()
    for note in notes:
        report.note(note)
    module = getattr(pipe, request.partition)
    if module is None:
        raise H3CompileError(
            f"{request.task} needs the partition {request.partition}, which is not here",
            "load it or change the task",
        )
    # Read before the pipeline runs: a damaged file is the user's error, not the pipeline's.
    conditions = _conditions(request)
    pipe.scheduler.set_shift(request.flow_shift)
    pipe.audio_scheduler.set_shift(request.audio_flow_shift)

    report.phase("encode", None)
    hooks = _watch(pipe, module, request.forwards, report, should_stop, decode)
    try:
        with quiet_libraries(), current(torch.device(pipe._execution_device)):
            result: dict[str, Any] = pipe(
                prompt=request.prompt,
                width=request.width,
                height=request.height,
                num_frames=request.frames,
                num_inference_steps=request.steps,
                generator=torch.Generator("cpu").manual_seed(request.seed),
                output_type="pt",
                output=["videos", "audio", "sampling_rate"],
                **conditions,
            )
            return result
    finally:
        for hook in hooks:
            hook.remove()
        vacate(pipe.components)


def _clip(video: torch.Tensor, sound: torch.Tensor, sample_rate: int) -> Clip:
    """The decoders' output, (frames, 3, height, width) in [0, 1] and (2, samples), as a clip."""
    if not (video.isfinite().all() and sound.isfinite().all()):
        raise H3CompileError("the generated clip has values that are not finite", "verify the engine")
    frames = (video * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return Clip(frames.cpu().numpy(), sound.float().cpu().numpy(), fps=FPS, sample_rate=sample_rate)


def _watch(
    pipe: ModularPipeline,
    module: nn.Module,
    forwards: int,
    report: Progress,
    should_stop: Callable[[], bool],
    decode: bool,
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that draw the denoising phase around the calls of ``module`` and stop between two of them."""
    done = 0

    def before(*_: Any) -> None:
        if should_stop():
            raise Interrupted(f"stopped after {done} of {forwards} forwards")
        if done == 0:
            vacate(pipe.components)  # the transformer has no hook that would have the others leave
            report.phase("denoise", forwards)

    def after(*_: Any) -> None:
        nonlocal done
        done += 1
        report.advance()
        if done == forwards:
            if not decode:
                raise _Denoised
            report.phase("decode", None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _conditions(request: Request) -> dict[str, Any]:
    if request.references:
        return {"references": [_reference(path, request.frames / FPS) for path in request.references]}
    keyframes = {"image": request.image, "last_image": request.last_image}
    return {name: read_image(path) for name, path in keyframes.items() if path is not None}


def _reference(path: Path, seconds: float) -> Any:
    """The reference in ``path``; what lies beyond the length of the clip is never used, so it is not read."""
    kind = probe(path)
    if kind is Media.IMAGE:
        return MiniMaxH3ImageReference(image=read_image(path))
    if kind is Media.SOUND:
        sound = read_sound(path, sample_rate=SAMPLE_RATE, seconds=seconds)
        return MiniMaxH3AudioReference(audio=torch.from_numpy(sound), sample_rate=SAMPLE_RATE)
    video = read_video(path, sample_rate=SAMPLE_RATE, seconds=seconds)
    if len(video.frames) / video.fps < _MIN_REFERENCE_SECONDS:
        raise H3CompileError(
            f"{path} is {len(video.frames) / video.fps:.2f} s long",
            "give a reference video of a second or more",
        )
    soundtrack = None if video.sound is None else torch.from_numpy(video.sound)
    return MiniMaxH3VideoReference(
        frames=video.frames, fps=video.fps, audio=soundtrack, sample_rate=SAMPLE_RATE
    )


def _open_index(model: Path) -> ModularPipeline:
    index = model / ModularPipeline.config_name
    mend = "give a checkpoint in the Diffusers layout of MiniMax-H3"
    # Diffusers would take a name for a repository and ask the network.
    if not index.is_file():
        raise CheckpointError(f"{model} has no {index.name}", mend)
    try:
        pipe = ModularPipeline.from_pretrained(str(model))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {index} ({error})", mend) from error
    if not isinstance(pipe, MiniMaxH3ModularPipeline):
        raise CheckpointError(f"{model} holds a {type(pipe).__name__}", mend)
    return pipe


def _load_component(pipe: ModularPipeline, name: str, dtype: torch.dtype | None) -> Any:
    # `pipe.load_components` only warns of a component it could not load, and leaves it out.
    options = {} if dtype is None else {"dtype": dtype}
    try:
        return pipe.get_component_spec(name).load(**options)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"cannot load {name} ({error})", "fetch the checkpoint again") from error


def _stored_dtype(partition: Path) -> torch.dtype:
    """What the weights are stored in: Diffusers makes them float32 unless told otherwise."""
    tensors = ShardedTensors(partition)
    return dominant_dtype({key: tensors.info(key).dtype for key in tensors})


def _silence_bars(block: Any) -> None:
    """Diffusers' own switch reaches only the outermost blocks; the loop with the bar lies deeper."""
    for inner in block.sub_blocks.values():
        if hasattr(inner, "set_progress_bar_config"):
            inner.set_progress_bar_config(disable=True)
        _silence_bars(inner)
