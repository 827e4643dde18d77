"""Writes the golden engine of the current schema: run once a schema version, and keep the result.

python tests/golden/make.py SCRATCH
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import h3compile
from h3compile.engine.manifest import SCHEMA_VERSION
from h3compile.models.tiny import write_tiny

SMALL = {
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 24,
    "ffn_dim": 40,
    "text_dim": 16,
    "freq_dim": 16,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}


def inputs() -> dict[str, torch.Tensor]:
    """One forward: 3 rows of text, 4 of audio, 5 of video, two timesteps, one of them in no table."""
    generator = torch.Generator().manual_seed(0)
    text, audio, video = 3, 4, 5
    rows = text + audio + video
    return {
        "hidden_states": torch.randn(1, video, 96, generator=generator),
        "audio_hidden_states": torch.randn(1, audio, 32, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, SMALL["text_dim"], generator=generator).bfloat16(),
        "timestep": torch.tensor([0.26, 0.999]),
        "timestep_indices": torch.tensor([0] * text + [1] * audio + [0] * video),
        "token_tags": torch.tensor([1] * text + [2] * audio + [0] * video),
        "position_ids": torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3) / 3,
        "video_indices": torch.arange(text + audio, rows),
        "audio_indices": torch.arange(text, text + audio),
        "text_indices": torch.arange(text),
    }


def main(scratch: Path) -> None:
    """Build the engine and keep what it answers to `inputs`."""
    write_tiny(scratch / "checkpoint", **SMALL)
    folder = Path(__file__).parent / f"v{SCHEMA_VERSION}.h3e"
    h3compile.build(str(scratch / "checkpoint"), target="cpu", backend="eager", steps=(3,), output=folder)
    given = inputs()
    sample, audio = h3compile.load(folder, device="cpu")(**given, return_dict=False)
    answers = {**given, "sample": sample, "audio_sample": audio}
    save_file(answers, folder.with_suffix(".safetensors"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
