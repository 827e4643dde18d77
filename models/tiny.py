"""A complete, small, seeded MiniMax-H3 pipeline in the published Diffusers layout, made with no network."""

from __future__ import annotations

import contextlib
import inspect
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers import __version__ as diffusers_version
from safetensors import SafetensorError
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from h3compile.errors import H3CompileError, nearest
from h3compile.models.h3 import FP32_MODULES, SHIFTS
from h3compile.models.quiet import quiet_libraries
from h3compile.models.tiny_tokenizer import build_processor, build_tokenizer
from h3compile.models.tiny_weights import cast, fill, smooth_patches

__all__ = ["TRANSFORMER_CONFIG", "ConfigValue", "write_tiny"]

ConfigValue: TypeAlias = int | float

# Every width differs from every other, so that a swapped dimension fails instead of passing by accident.
# As in the release, heads x head_dim exceeds hidden_size, three quarters of a head are rotated, and AdaLN is
# 40 % of a block.
TRANSFORMER_CONFIG: dict[str, ConfigValue] = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "hidden_size": 80,
    "num_layers": 4,
    "num_refiner_layers": 2,
    "ffn_dim": 208,
    "text_dim": 64,
    "freq_dim": 32,
    "time_embed_hidden_dim": 112,
    "time_embed_dim": 48,
    "rope_freq_dim": 2,
}

# What the VAEs, which are not configurable here, have to agree with.
_FIXED = ("in_channels", "audio_in_channels", "patch_size")

# A transformer's modulation has to matter: scales and gates of order 0.3 that move with the timestep. The
# sinusoids of t in [0, 1] move little, hence the first factor.
_TRANSFORMER_GAINS = {
    "time_embedder.linear_1.weight": 3.0,
    "adaln_proj.linear.weight": 0.6,
    "adaln_proj.linear.bias": 0.3,
    "norm_out.linear.weight": 0.6,
    "norm_out.linear.bias": 0.3,
}
# 51 layers add to one residual stream: each adds little.
_TEXT_GAINS = {"embed_tokens.weight": 8.0, "o_proj.weight": 0.3, "down_proj.weight": 0.3}
# The published VAE starts its residual branches at zero; here they have to be heard.
_VAE_GAINS = {"scale1": 0.4, "scale2": 0.4, "register_tokens": 8.0}
# Puts the waveform near -18 dBFS, clear of the decoder's clamp.
_AUDIO_VAE_GAINS = {"conv_post.weight_g": 0.06}

_INDEX: dict[str, tuple[str, str]] = {
    "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "processor": ("transformers", "Qwen3VLProcessor"),
    "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
    "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
    "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "transformer_ref": ("diffusers", "MiniMaxH3Transformer3DModel"),
    "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
}


def write_tiny(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int = 600_000,
    progress: Callable[[str], None] | None = None,
    **transformer_config: ConfigValue,
) -> None:
    """Write the tiny pipeline to ``directory``: every component ``diffusers.ModularPipeline`` loads for H3.

    The same arguments write the same bytes. Nothing appears under ``directory`` until everything is written.

    Args:
        directory: must not exist, or be empty.
        seed: seed of all weights; the two transformers differ.
        dtype: bfloat16 mixes as the release does: the transformers keep float32 patch projections, time
            embedder and heads, both VAEs stay float32, the rest is bfloat16. float32 is float32 throughout.
        max_shard_size: bytes a file of transformer weights may have; the default makes several shards.
        progress: called with the name of each component before it is made.
        transformer_config: replaces entries of ``TRANSFORMER_CONFIG`` in both transformers: ``num_layers=3``.

    Raises:
        H3CompileError: the directory is in use or cannot be written, or an argument is not usable.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise H3CompileError(f"no tiny pipeline in {dtype}", "choose torch.bfloat16 or torch.float32")
    config = TRANSFORMER_CONFIG | _checked(transformer_config)
    report = progress or (lambda _: None)
    with _appears_whole(directory.absolute()) as work, quiet_libraries():
        report("tokenizer")
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(work / "tokenizer")
        report("processor")
        build_processor(tokenizer).save_pretrained(work / "processor")
        report("text_encoder")
        _text_encoder(tokenizer, int(config["text_dim"]), seed, dtype).save_pretrained(work / "text_encoder")
        for name in ("transformer", "transformer_ref"):
            report(name)
            _transformer(config, name, seed, dtype).save_pretrained(
                work / name, max_shard_size=max_shard_size
            )
        report("vae")
        _vae(seed).save_pretrained(work / "vae")
        report("audio_vae")
        _audio_vae(seed).save_pretrained(work / "audio_vae")
        for name, shift in (("scheduler", SHIFTS["video"]), ("audio_scheduler", SHIFTS["audio"])):
            report(name)
            MiniMaxH3Scheduler(shift=shift).save_pretrained(work / name)
        _write_index(work / "modular_model_index.json")


def _checked(overrides: dict[str, ConfigValue]) -> dict[str, ConfigValue]:
    known = set(inspect.signature(MiniMaxH3Transformer3DModel).parameters) - set(_FIXED)
    for name in overrides:
        if name in _FIXED:
            raise H3CompileError(f"{name} of the tiny pipeline is fixed by its VAEs", "leave it out")
        if name not in known:
            raise H3CompileError(f"the transformer has no setting {name!r}", nearest(name, known))
    return overrides


@contextlib.contextmanager
def _appears_whole(directory: Path) -> Iterator[Path]:
    """A sibling to write in, renamed to ``directory`` on success and removed on any failure."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise H3CompileError(f"{directory} exists and is not empty", "choose another directory or remove it")
    work = directory.parent / f".{directory.name}.{secrets.token_hex(4)}.partial"
    try:
        work.mkdir(parents=True)
        yield work
        work.replace(directory)
    except (OSError, SafetensorError) as error:
        raise H3CompileError(f"cannot write {directory} ({error})", "choose a directory with room") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _transformer(
    config: dict[str, ConfigValue], name: str, seed: int, dtype: torch.dtype
) -> MiniMaxH3Transformer3DModel:
    model = MiniMaxH3Transformer3DModel(**config)
    fill(model, seed=seed, scope=name, gains=_TRANSFORMER_GAINS)
    cast(model, dtype, keep=frozenset(FP32_MODULES))
    return model


def _text_encoder(
    tokenizer: Qwen2Tokenizer, width: int, seed: int, dtype: torch.dtype
) -> Qwen3VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        # H3 reads hidden state 50 and refuses a stack whose last layer that is.
        "num_hidden_layers": 51,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            # Of the 8 frequencies of a head, how many follow time, height and width.
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": width,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    model = Qwen3VLForConditionalGeneration(config)
    fill(model, seed=seed, scope="text_encoder", gains=_TEXT_GAINS)
    return model.to(dtype)


def _vae(seed: int) -> AutoencoderKLMiniMaxH3:
    # Six levels and 16 x 4 x (2x2 patch) compression as published; only the widths shrink.
    model = AutoencoderKLMiniMaxH3(
        block_out_channels=(8, 8, 16, 16, 16, 24),
        layers_per_block=1,
        norm_num_groups=8,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=[round(0.02 * (index - 12), 4) for index in range(24)],
        latents_std=[round(0.8 + 0.02 * index, 4) for index in range(24)],
    )
    fill(model, seed=seed, scope="vae", gains=_VAE_GAINS)
    patch = (
        3,
        model.temporal_compression_ratio,
        model.spatial_compression_ratio,
        model.spatial_compression_ratio,
    )
    smooth_patches(model.decoder.proj_out.weight, patch=patch, seed=seed, scope="vae")
    with torch.no_grad():
        # The second half is the log variance of the posterior, which conditioning samples from.
        model.quant_conv.bias[model.config.latent_channels :] -= 6.0
    return model


def _audio_vae(seed: int) -> AutoencoderKLMiniMaxH3Audio:
    # The published strides; the upsampling by 800 takes five stages instead of seven.
    model = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        latent_dim=64,
        num_attention_heads=2,
        decoder_dim=64,
        decoder_rates=(5, 5, 4, 4, 2),
        decoder_kernel_sizes=(9, 9, 8, 8, 4),
        resblock_kernel_sizes=(3, 7),
        resblock_dilation_sizes=((1, 3), (1, 3)),
        latents_mean=[round(0.02 * (index - 16), 4) for index in range(32)],
        latents_std=[round(0.8 + 0.02 * index, 4) for index in range(32)],
    )
    fill(model, seed=seed, scope="audio_vae", gains=_AUDIO_VAE_GAINS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("encoder.") and name.endswith(".alpha"):
                # Snake divides by alpha, which starts at one.
                parameter.abs_().add_(1.0)
    return model


def _write_index(path: Path) -> None:
    """The pipeline's index; no component names a repository, so none can be fetched for a local one."""
    index: dict[str, object] = {
        "_class_name": "MiniMaxH3ModularPipeline",
        "_diffusers_version": diffusers_version,
        "_blocks_class_name": "MiniMaxH3Blocks",
        # References are put on these canvases to be encoded; the release has 768, 768 * 1344 and 2048.
        "canvas_short_edge": 64,
        "canvas_max_pixels": 64 * 128,
        "reference_image_short_edge": 64,
    }
    for name, (library, class_name) in _INDEX.items():
        source = {"pretrained_model_name_or_path": None, "subfolder": name, "variant": None, "revision": None}
        index[name] = [library, class_name, {"type_hint": [library, class_name], **source}]
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
