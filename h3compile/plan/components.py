"""The other tenants of the card: H3's text encoder and its two VAEs.

`h3compile` does not compile them, but they share the device with the transformer, before and after its steps.
What is known of them comes from published reports, named beside each number; what is estimated says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from h3compile.targets import Target

__all__ = [
    "AUDIO_VAE",
    "COMPONENTS",
    "TEXT_ENCODER",
    "VIDEO_VAE",
    "VIDEO_VAE_FP16",
    "Component",
    "Phase",
    "Placement",
    "host_bytes",
    "other_seconds",
]

Phase = Literal["encode", "denoise", "decode"]

# ``resident``: its weights stay on the device through the whole request; ``moved``: they come from host
# memory for its phase and go; ``streamed``: the same a layer at a time, two of them on the device, as
# layerwise offload of Diffusers, vLLM-Omni and SGLang does; ``elsewhere``: another device or process does
# its work.
Placement = Literal["resident", "moved", "streamed", "elsewhere"]


@dataclass(frozen=True)
class Component:
    """One tenant: bytes of its weights on a device, what its work adds in its phase, where the weights live.

    ``largest`` is the part of the weights that cannot be brought in smaller parts. ``peak`` is in bytes
    beside the weights; ``pixel_bytes`` comes on top for every pixel of every frame.
    """

    name: str
    title: str
    phase: Phase
    weights: int
    largest: int
    peak: int
    pixel_bytes: int = 0
    placement: Placement = "moved"

    def placed(self, placement: Placement, *, shards: int = 1) -> Component:
        """The same with its weights elsewhere, or spread over ``shards`` devices."""
        weights, largest = (-(-count // shards) for count in (self.weights, self.largest))
        return replace(self, placement=placement, weights=weights, largest=largest)

    def on_device(self, phase: Phase) -> int:
        """Bytes of its weights on the device in ``phase``."""
        match self.placement:
            case "resident":
                return self.weights
            case "moved":
                return self.weights if phase == self.phase else 0
            case "streamed":
                return min(self.weights, 2 * self.largest) if phase == self.phase else 0
            case "elsewhere":
                return 0

    def work_bytes(self, pixels: int) -> int:
        """Bytes beside the weights while it works on a clip of so many ``pixels``, all frames together."""
        return self.peak + self.pixel_bytes * pixels


# Qwen3-VL-32B in BF16, of which H3 reads hidden state 50 of 64: 51.5 GB for the layers in use (vllm-omni
# #5764). What Diffusers loads is whole, 66.7 GB (unsloth #8283); `h3compile run` keeps one layer more than
# are in use. Its largest part is the embedding, 151,936 x 5120; a layer has 0.97 GB. The peak is an estimate:
# a prompt of some hundred rows with a picture.
TEXT_ENCODER = Component(
    "text-encoder",
    "text encoder (Qwen3-VL-32B, 50 layers, BF16)",
    "encode",
    weights=51_500_000_000,
    largest=1_556_000_000,
    peak=10**9,
)

# Stored in FP32: decoder 9.69 GB, encoder 0.72 GB; 0.37 GB of activations, tile by tile, and 4.91 GB of
# FP16 copies that autocast keeps while it decodes (all measured, unsloth #7989): streaming keeps them all
# the same. A layer has 2048 channels and 0.27 GB. The decoded clip is FP32, 3 channels, 12 bytes a pixel
# (FastVideo #1703 says that it stays on the device; an estimate for others).
VIDEO_VAE = Component(
    "video-vae",
    "video VAE (FP32, decoding under autocast)",
    "decode",
    weights=10_420_000_000,
    largest=270_000_000,
    peak=5_280_000_000,
    pixel_bytes=12,
)

# The same with weights stored as FP16, as ComfyUI ships them: 4.85 GiB, and no copies to keep.
VIDEO_VAE_FP16 = replace(
    VIDEO_VAE, title="video VAE (FP16)", weights=5_208_000_000, largest=135_000_000, peak=370_000_000
)

# 0.61 GB in FP32 (unsloth #7989); its work on 15 s of sound is small, an estimate.
AUDIO_VAE = Component(
    "audio-vae", "audio VAE (FP32)", "decode", weights=610_000_000, largest=610_000_000, peak=200_000_000
)

COMPONENTS: Mapping[str, Component] = {
    component.name: component for component in (TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE)
}

# Seconds a frame of 1344x768 to decode: 0.066 on one B300 (8.2 s for 124 frames, vllm-omni #6014), 0.061 on
# one H200 (12.8 s for 209, vllm-omni #5691), 0.034 times 4 on four B300 (1.76 s for 209, vllm-omni #5750).
# So tiles share ranks at a loss-free rate, spread 0.034 to 0.066: 0.055 is an estimate for anything as fast
# as an H200.
_DECODE = 0.055
_DECODE_PIXELS = 1344 * 768
# The BF16 rate to which that belongs; a slower device decodes slower (GB10: 70 s for 192 frames of 960x576,
# #5972).
_DECODE_RATE = 7.2e14
# A prompt through 50 layers: 0.02 s where it was warm to 0.5 s (the same reports). An estimate.
_ENCODE = 0.2
# Sound and MP4, on the host: what complete times of four forwards on 8x B300 leave for 5 and 10 s clips.
_MUX = (1.0, 0.005)


def other_seconds(
    target: Target, *, frames: int, width: int, height: int, shards: int = 1
) -> dict[str, float]:
    """Seconds of a request outside of the transformer, by part; all estimates.

    ``shards`` devices share the tiles of the decoder.
    """
    slower = max(1.0, _DECODE_RATE / target.rate("gemm.bfloat16").reached)
    decode = _DECODE * frames * (width * height / _DECODE_PIXELS) * slower / shards
    return {"encode": _ENCODE * slower, "decode": decode, "mux": _MUX[0] + _MUX[1] * frames}


def host_bytes(components: Iterable[Component]) -> int:
    """Bytes of host memory that weights which come and go take."""
    return sum(component.weights for component in components if component.placement in ("moved", "streamed"))
