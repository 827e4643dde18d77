"""Finds an H3 checkpoint and opens one partition of it: the published Diffusers layout.

Nothing here uses the network. Other layouts are recognised, so that the error can name them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from h3compile.errors import CheckpointError, nearest
from h3compile.models.h3 import ARCHITECTURE, PARTITIONS, RELEASE_CONFIG
from h3compile.program.serialize import dtype_name
from h3compile.program.source import ShardedTensors

__all__ = [
    "RELEASE",
    "Expected",
    "Partition",
    "PipelineFolder",
    "check",
    "find_checkpoint",
    "open_partition",
    "read_partition_config",
]

RELEASE = "MiniMaxAI/MiniMax-H3"

# Tensor name -> shape, and dtype where only one will do.
Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]

_ORIGINAL = ("FL2VA", "Ref2VA")  # the folders of the layout that MiniMax trains with
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_CONVERT = "give the release in the Diffusers layout: a folder with transformer/config.json"
_SHOWN = 3  # tensors listed by name in one message


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline in the Diffusers layout: its folder, and the folder of each partition that is there."""

    root: Path
    partitions: Mapping[str, Path]


@dataclass(frozen=True)
class Partition:
    """One set of transformer weights: ``config`` with the fields of the release, and the tensors."""

    name: str
    folder: Path
    config: Mapping[str, int | float | tuple[int, ...]]
    tensors: ShardedTensors


def find_checkpoint(model: str) -> PipelineFolder:
    """The checkpoint that ``model`` names: a folder, or a repository in the local Hugging Face cache.

    A folder is a pipeline with ``transformer/`` or ``transformer_ref/``, or one of those itself. Raises
    `CheckpointError` when there is none, or when it is in a layout that is not read.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return _find_in(path.resolve())
    if model == "tiny":
        raise CheckpointError("there is no tiny checkpoint yet", "write one with h3compile tiny DIR")
    if _REPO.fullmatch(model) and not model.startswith("."):
        cached = _cached(model)
        if not any((cached / name).exists() for name in (*PARTITIONS, *_ORIGINAL, "config.json")):
            raise CheckpointError(
                f"{model} is in the local Hugging Face cache without its transformer",
                f"run hf download {model}",
            )
        return _find_in(cached)
    raise CheckpointError(
        f"there is no model {model!r}", "give a folder, or a repository id in the local Hugging Face cache"
    )


def open_partition(folder: PipelineFolder, partition: str) -> Partition:
    """Reads the configuration and the headers of one partition, and checks both.

    Raises `CheckpointError` when the partition does not exist, its ``config.json`` is unreadable or of
    another architecture, a file is missing or truncated, or the tensors are stored in another layout.
    """
    if partition not in folder.partitions:
        raise CheckpointError(
            f"{folder.root} has no partition {partition!r}", nearest(partition, folder.partitions)
        )
    path = folder.partitions[partition]
    config = _read_config(path / "config.json")
    if not any(path.glob("*.safetensors*")):
        _refuse_other_layouts(path)
    tensors = ShardedTensors(path)
    _refuse_other_keys(path, tensors)
    return Partition(partition, path, config, tensors)


def read_partition_config(model: str, partition: str) -> dict[str, int | float | tuple[int, ...]]:
    """The configuration of one partition of ``model``, whose weights need not be there.

    Raises `CheckpointError` as `find_checkpoint` and `open_partition` do for a configuration.
    """
    folder = find_checkpoint(model)
    if partition not in folder.partitions:
        raise CheckpointError(
            f"{folder.root} has no partition {partition!r}", nearest(partition, folder.partitions)
        )
    return _read_config(folder.partitions[partition] / "config.json")


def check(partition: Partition, expected: Expected) -> None:
    """Compares the stored tensors with what the model has.

    Raises `CheckpointError` for missing tensors, unexpected ones, wrong shapes and wrong dtypes, in this
    order: how many there are, and the first of them by name.
    """
    tensors, where = partition.tensors, partition.folder
    mend = "download it again, or use the checkpoint that goes with its config.json"
    missing = [key for key in expected if key not in tensors]
    if missing:
        raise CheckpointError(f"{where} lacks {_some(missing, 'tensor')}", mend)
    unexpected = [key for key in tensors if key not in expected]
    if unexpected:
        raise CheckpointError(f"{where} has {_some(unexpected, 'unexpected tensor')}", mend)
    shapes, dtypes = [], []
    for key, (shape, dtype) in expected.items():
        info = tensors.info(key)
        if info.shape != shape:
            shapes.append(f"{key} is {list(info.shape)}, not {list(shape)}")
        elif dtype is not None and info.dtype != dtype:
            dtypes.append(f"{key} is {dtype_name(info.dtype)}, not {dtype_name(dtype)}")
    if shapes:
        raise CheckpointError(f"{where} has {_some(shapes, 'tensor')} of the wrong shape", mend)
    if dtypes:
        raise CheckpointError(f"{where} has {_some(dtypes, 'tensor')} of the wrong dtype", mend)


def _find_in(path: Path) -> PipelineFolder:
    if path.is_file():
        raise _unread(path)
    partitions = {name: path / name for name in PARTITIONS if (path / name / "config.json").is_file()}
    if partitions:
        return PipelineFolder(path, partitions)
    if _names_architecture(path / "config.json"):
        name = path.name if path.name in PARTITIONS else next(iter(PARTITIONS))
        # What `run` needs besides lies next to it, when this is a part of a whole pipeline.
        root = path.parent if (path.parent / "modular_model_index.json").is_file() else path
        return PipelineFolder(root, {name: path})
    _refuse_other_layouts(path)
    if (path / "config.json").is_file():
        _read_config(path / "config.json")
    raise CheckpointError(f"{path} holds no safetensors of a transformer", _CONVERT)


def _cached(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"{repository} is no folder, and the Hugging Face cache cannot be read",
            "pip install 'h3compile[model]'",
        ) from None
    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise CheckpointError(
            f"{repository} is no folder and is not in the local Hugging Face cache",
            f"run hf download {repository}, or name another model",
        ) from None


def _read_config(path: Path) -> dict[str, int | float | tuple[int, ...]]:
    """The fields of the release's configuration, lists as tuples."""
    fields = _read_json(path)
    architecture = fields.get("_class_name")
    if architecture != ARCHITECTURE:
        raise CheckpointError(f"{path} is the config of {architecture!r}, not of {ARCHITECTURE}", _CONVERT)
    if "quantization_config" in fields:
        raise CheckpointError(f"{path.parent} is a quantized checkpoint", "give the BF16 release")
    config: dict[str, int | float | tuple[int, ...]] = {}
    for name, example in RELEASE_CONFIG.items():
        if name not in fields:
            raise CheckpointError(f"{path} lacks the field {name}", "download it again")
        value = _as_like(fields[name], example)
        if value is None:
            raise CheckpointError(
                f"{path} has {name} = {json.dumps(fields[name])}", f"it must be like {json.dumps(example)}"
            )
        config[name] = value
    return config


def _as_like(value: object, example: int | float | tuple[int, ...]) -> int | float | tuple[int, ...] | None:
    """``value`` as the type of ``example``, positive; None when it is something else."""
    match example, value:
        case _, bool():
            return None
        case tuple(), list() if len(value) == len(example) and all(type(n) is int and n > 0 for n in value):
            return tuple(value)
        case float(), int() | float() if value > 0:
            return float(value)
        case int(), int() if value > 0:
            return value
    return None


def _read_json(path: Path) -> dict[str, object]:
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})", "download it again") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is not a configuration", "download it again")
    return fields


def _names_architecture(path: Path) -> bool:
    return path.is_file() and _read_json(path).get("_class_name") == ARCHITECTURE


def _refuse_other_layouts(path: Path) -> None:
    """Raises for what other tools write, told by names alone."""
    for name in _ORIGINAL:
        if (path / name).is_dir() or (path.name == name and (path / "transformer").is_dir()):
            raise CheckpointError(f"{path} is the original layout ({name}), which is not read yet", _CONVERT)
    for file in sorted(path.iterdir()):
        if file.suffix == ".gguf" or file.name.startswith("minimax_h3_"):
            raise _unread(file)


def _unread(file: Path) -> CheckpointError:
    if file.suffix == ".gguf":
        return CheckpointError(f"{file} is a GGUF file, which is not read yet", _CONVERT)
    if file.suffix == ".safetensors":
        return CheckpointError(f"{file} is a single-file checkpoint, which is not read yet", _CONVERT)
    return CheckpointError(f"{file} is a file, not a checkpoint folder", _CONVERT)


def _refuse_other_keys(path: Path, tensors: ShardedTensors) -> None:
    """Raises for weights that are named or stored in another tool's way inside a folder that looks right."""
    for key in tensors:
        if key.endswith((".comfy_quant", ".weight_scale", ".weight_scale_inv", ".input_scale")):
            raise CheckpointError(f"{path} is a quantized checkpoint ({key})", "give the BF16 release")
        if key.endswith("adaln_t_table"):
            raise CheckpointError(f"{path} is a pruned ComfyUI checkpoint ({key}), not read yet", _CONVERT)
        if ".qkv_proj." in key:
            raise CheckpointError(f"{path} has the original names ({key}), which are not read yet", _CONVERT)


def _some(items: list[str], noun: str) -> str:
    shown = ", ".join(items[:_SHOWN])
    more = ", ..." if len(items) > _SHOWN else ""
    return f"{len(items)} {noun}{'s' if len(items) > 1 else ''} ({shown}{more})"
