"""What every rank must say alike before a forward, and before what was measured is added up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from h3compile.errors import H3CompileError, Interrupted

__all__ = ["Word", "difference", "digest", "shape_digest"]


@dataclass(frozen=True)
class Word:
    """One rank's: ``inputs`` by name and digest, or a ``refusal``, and whether it was asked to ``stop``.

    ``missing`` names what is to be computed for the request before the step. ``measured`` asks for no forward
    but for the sum of what so many steps measured.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    stop: bool = False
    refusal: str | None = None
    measured: int | None = None

    def encode(self) -> str:
        """As text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Word:
        """The word that was encoded."""
        record = json.loads(text)
        return cls(**record | {"missing": tuple(record["missing"])})


def difference(words: Sequence[Word]) -> H3CompileError | None:
    """Why these words, rank by rank, do not let the ranks do what they ask for together; None: they do.

    Every rank comes to the same end, before anything was exchanged: the next forward may run.
    """
    for rank, word in enumerate(words):
        if word.refusal is not None:
            return H3CompileError(
                f"rank {rank} refuses its inputs: {word.refusal}", "call every rank with the same inputs"
            )
    for rank, word in enumerate(words):
        if word.measured != words[0].measured:
            asked = " and ".join(f"rank {at} for {_asked(words[at])}" for at in (0, rank))
            return H3CompileError(f"{asked}: they ask for different things", "have every rank call the same")
    for rank, word in enumerate(words):
        for name, found in words[0].inputs.items():
            if word.inputs.get(name, found) != found:
                return H3CompileError(
                    f"ranks 0 and {rank} were given different {name}",
                    "call every rank with the same inputs, noise included",
                )
    if any(word.stop for word in words):
        return Interrupted("the forward was stopped")
    return None


def _asked(word: Word) -> str:
    return "a forward" if word.measured is None else f"what {word.measured} steps measured"


def shape_digest(tensor: torch.Tensor) -> str:
    """Equal for tensors of one dtype and shape, whatever they hold."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def digest(tensor: torch.Tensor) -> str:
    """Equal for tensors of one dtype and shape that hold the same bits. Waits for the device."""
    data = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
    return f"{shape_digest(tensor)} {hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()}"
