"""MiniMax-H3: the facts the compiler stands on, each with its reason.

Nothing outside `h3compile.models` knows a module name of Diffusers or a size of H3.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from h3compile.program.facts import Dim, InputFact, ModelFacts, Repeat
from h3compile.program.stages import Stage

__all__ = [
    "ARCHITECTURE",
    "CONDITION_TIMESTEPS",
    "FP32_MODULES",
    "LABELS",
    "PARTITIONS",
    "RELEASE_CONFIG",
    "SHIFTS",
    "TAGS",
    "UNQUANTIZED_MODULES",
    "Config",
    "dominant_dtype",
    "facts_for",
    "release_dtype",
    "schedule_timesteps",
]

Config = Mapping[str, int | float | tuple[int, ...]]

# The class named in a partition's config.json; anything else is another model.
ARCHITECTURE = "MiniMaxH3Transformer3DModel"

# Two sets of weights for one program: text and key frames to video, and references to video.
PARTITIONS = {"transformer": ("t2va", "fl2va"), "transformer_ref": ("ref2va",)}

RELEASE_CONFIG: Config = {
    "num_attention_heads": 56,
    "attention_head_dim": 128,
    "hidden_size": 5376,
    "num_layers": 50,
    "num_refiner_layers": 2,
    "ffn_dim": 14336,
    "in_channels": 24,
    "audio_in_channels": 32,
    "patch_size": (1, 2, 2),
    "text_dim": 5120,
    "freq_dim": 256,
    "time_embed_hidden_dim": 5376,
    "time_embed_dim": 2688,
    "rope_freq_dim": 16,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "qk_norm_eps": 1e-5,
    "final_norm_eps": 1e-5,
}

# The patch projections and output heads touch the latents directly, and the timestep MLP feeds every
# block: their rounding errors are not averaged away, so the release keeps them in FP32.
FP32_MODULES = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")

# What no pass may quantize, besides: the modulation scales, shifts and gates every row of every block.
UNQUANTIZED_MODULES = (*FP32_MODULES, "adaln_proj", "norm_out")

# The modality of a row; a row of the modulation table is 3 * timestep index + tag.
TAGS = {"video": 0, "text": 1, "audio": 2}

# Two schedules a request: the video latents have far more dimensions, so they need more steps at high noise.
SHIFTS = {"video": 12.0, "audio": 3.0}

# Image and video conditioning rows are held just short of clean, as in training; audio references are clean.
CONDITION_TIMESTEPS = (0.999, 1.0)


# Names for the values people look for in a printed program: (module, operator) -> name, with * for the
# number of a block. Only the names of nodes depend on them.
LABELS: Mapping[tuple[str, str], str] = {
    ("context_embedder", "aten.linear.default"): "projected_text",
    ("token_refiner.refiner_blocks.*", "aten.add.Tensor"): "text",
    ("token_refiner.final_norm", "aten.rms_norm.default"): "refined_text",
    ("rope", "aten.cos.default"): "cos",
    ("rope", "aten.sin.default"): "sin",
    ("proj_in", "aten.linear.default"): "video_embeds",
    ("audio_proj_in", "aten.linear.default"): "audio_embeds",
    ("time_embedder.linear_2", "aten.linear.default"): "temb",
    ("transformer_blocks.*.adaln_proj", "aten.silu.default"): "activated_temb",
    ("norm_out", "aten.silu.default"): "activated_temb",
    ("transformer_blocks.*.adaln_proj.linear", "aten.linear.default"): "modulation",
    ("norm_out.linear", "aten.linear.default"): "output_modulation",
    ("", "aten.add.Tensor"): "modulation_index",
    ("", "aten.index_copy.default"): "packed",
    ("transformer_blocks.*", "aten.add.Tensor"): "hidden",
}


def release_dtype(weight: str) -> torch.dtype:
    """The dtype the release stores ``weight`` in."""
    return torch.float32 if weight.split(".")[0] in FP32_MODULES else torch.bfloat16


def dominant_dtype(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The dtype of the packed sequence, which is that of the text projection."""
    return dtypes["context_embedder.weight"]


def facts_for(config: Config, dtypes: Mapping[str, torch.dtype]) -> ModelFacts:
    """The facts of an H3 of this configuration, whose weights are stored in ``dtypes``.

    Row counts are those of one packed sequence, batch 1. The hints are 1344x768, 124 frames, 50 text
    rows, the size most requests have.
    """
    patch = config["patch_size"]
    assert isinstance(patch, tuple)
    channels = _int(config, "in_channels")
    for extent in patch:
        channels *= extent
    layers, refiners = _int(config, "num_layers"), _int(config, "num_refiner_layers")

    # Each input is declared in the dtype the model itself casts it to first, so a caller's dtype never
    # reaches the graph: positions arrive as float64 and are rounded to FP32 before the rotary angles.
    inputs = (
        InputFact("hidden_states", dtypes["proj_in.weight"], (1, "video_rows", channels), Stage.STEP),
        InputFact(
            "audio_hidden_states",
            dtypes["audio_proj_in.weight"],
            (1, "audio_rows", _int(config, "audio_in_channels")),
            Stage.STEP,
        ),
        InputFact(
            "encoder_hidden_states",
            dtypes["context_embedder.weight"],
            (1, "text_rows", _int(config, "text_dim")),
            Stage.REQUEST,
        ),
        InputFact("timestep", torch.float32, ("timesteps",), Stage.SCHEDULE),
        # The number of distinct timesteps changes within a request, and these indices with it.
        InputFact("timestep_indices", torch.int64, ("rows",), Stage.STEP),
        InputFact("token_tags", torch.int64, ("rows",), Stage.REQUEST),
        InputFact("position_ids", torch.float32, ("rows", 3), Stage.REQUEST),
        InputFact("video_indices", torch.int64, ("video_rows",), Stage.REQUEST),
        InputFact("audio_indices", torch.int64, ("audio_rows",), Stage.REQUEST),
        InputFact("text_indices", torch.int64, ("text_rows",), Stage.REQUEST),
    )
    return ModelFacts(
        name=ARCHITECTURE,
        config=dict(config),
        dims=(
            Dim("rows", hint=37_760),
            Dim("video_rows", hint=37_296),
            Dim("audio_rows", hint=414),
            Dim("text_rows", hint=50),
            # Beyond this a modulation table has more elements than 32 bits can index.
            Dim("timesteps", hint=2, largest=(2**31 - 1) // (len(TAGS) * 6 * _int(config, "hidden_size"))),
        ),
        inputs=inputs,
        outputs=("sample", "audio_sample"),
        repeats=(
            Repeat("refiner", "token_refiner.refiner_blocks", refiners),
            Repeat("block", "transformer_blocks", layers),
        ),
        segments=("input", "embed", "head"),
        expected={
            # One dropout after the attention projection and one inside the feed-forward of every block.
            "canonicalize": {"dropout": 2 * (layers + refiners)},
            "outline": {"block": layers, "refiner": refiners},
            # cos, sin and the refined text.
            "hoist": {"value": 3},
            # One AdaLN projection a block, one for the output norm.
            "fold-schedule": {"table": layers + 1},
            # The refiner has neither modulation nor gates; the output norm is modulated, but not gated.
            "fuse": {
                "qkv": layers + refiners,
                "attention": layers + refiners,
                "qk-norm-rope": layers + refiners,
                "modulated-norm": 2 * layers + 1,
                "gate": 2 * layers,
                "gated-norm": layers,
                "swiglu": layers + refiners,
            },
            # q, k, v, out, up and down of every block, and the text projection; joined ones count as parts.
            "fp8": {"projection": 6 * (layers + refiners) + 1},
            # The refiner's attention is short and runs once a request: it stays dense.
            "sage": {"attention": layers},
            "skip": {"attention": layers},
            # The refiner's rows are few, and every rank computes them.
            "sp": {"attention": layers, "packed": 1, "gathered": 1},
        },
        unquantized=UNQUANTIZED_MODULES,
    )


def schedule_timesteps(steps: int, shift: float) -> list[float]:
    """The t of every forward for ``steps`` grid points: ``steps - 1`` values, exact in float32.

    t = 1 - sigma with sigma = s*u / (1 + (s-1)*u) over u = linspace(1, 0, steps) in FP32 on the CPU,
    consecutive duplicates dropped, the terminal sigma without a forward: Diffusers' `MiniMaxH3Scheduler`.
    """
    grid = torch.linspace(1.0, 0.0, steps, dtype=torch.float32)
    sigmas = torch.unique_consecutive(shift * grid / (1 + (shift - 1) * grid))
    timesteps: list[float] = (1.0 - sigmas[:-1]).tolist()
    return timesteps


def _int(config: Config, key: str) -> int:
    value = config[key]
    assert isinstance(value, int), key
    return value
