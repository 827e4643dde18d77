"""What a forward will need of the device beside weights and tables, known before there is any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h3compile.engine.manifest import Manifest
from h3compile.engine.records import dims_of, parallel_of
from h3compile.errors import EngineError, H3CompileError, nearest
from h3compile.plan.polynomial import Polynomial
from h3compile.program.facts import Dim

__all__ = ["Activations", "Rows", "activations_for"]

# The rows of a sequence, or the length of each kind of them by the names of the engine's dims.
Rows = int | Mapping[str, int]


@dataclass(frozen=True)
class Activations:
    """The most ``nbytes`` that live at once in a forward of ``rows`` rows, by liveness."""

    rows: int
    nbytes: int


def activations_for(manifest: Manifest, rows: Rows) -> Activations | None:
    """Those of one rank in a forward of ``rows``; None where the engine does not say what one takes.

    A number alone counts as a clip with the text and the sound that the engine was tuned for. Raises
    `H3CompileError` for a length that the engine has not.
    """
    lengths = _lengths(manifest, rows)
    whole = lengths[_length_of(manifest, "token_tags")]
    if not manifest.activations:
        return None
    parallel = parallel_of(manifest)
    if parallel is not None:
        own = parallel.dims([Dim(name, length, 1, length) for name, length in lengths.items()])
        lengths |= {dim.name: dim.hint for dim in own}
    try:
        nbytes = max(Polynomial.parse(text).at(lengths) for text in manifest.activations)
    except (KeyError, ValueError) as error:
        cause = f"the engine's activations cannot be read ({error})"
        raise EngineError(cause, "rebuild the engine") from None
    return Activations(whole, round(nbytes))


def _lengths(manifest: Manifest, rows: Rows) -> dict[str, int]:
    dims = {dim.name: dim for dim in dims_of(manifest)}
    lengths = {name: dim.hint for name, dim in dims.items()}
    if isinstance(rows, Mapping):
        given = dict(rows)
    else:
        every = _length_of(manifest, "token_tags")
        video, *others = (_length_of(manifest, f"{kind}_indices") for kind in ("video", "audio", "text"))
        given = {every: rows, video: max(dims[video].smallest, rows - sum(lengths[kind] for kind in others))}
    for name, length in given.items():
        if name not in dims:
            raise H3CompileError(f"the engine has no length {name!r}", nearest(name, dims))
        dim = dims[name]
        if not dim.smallest <= length <= dim.largest:
            raise H3CompileError(
                f"{name} is {length:,}", f"this engine takes {dim.smallest:,} to {dim.largest:,}"
            )
    return lengths | given


def _length_of(manifest: Manifest, port: str) -> str:
    """The dim that the input ``port`` is as long as."""
    return str(next(found.shape[0] for found in manifest.inputs if found.name == port))
