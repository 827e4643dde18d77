"""Calibration files: the largest magnitude every linear's input reached on calibration data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from h3compile.errors import BuildError
from h3compile.program.weights import E4M3_MAX

__all__ = ["FORMAT", "Calibration", "read_calibration", "write_calibration"]

FORMAT = "h3compile-calibration-1"


@dataclass(frozen=True)
class Calibration:
    """The largest input magnitude by linear, under the name of the linear's weight in the checkpoint.

    ``partition`` is the set of weights they were seen on, where that is recorded.
    """

    amax: Mapping[str, float]
    partition: str | None = None

    def input_scale(self, weights: Sequence[str]) -> float:
        """The E4M3 scale, amax / 448, of the input that the linears with these ``weights`` share.

        Raises `BuildError` for a linear that was not calibrated.
        """
        missing = [weight for weight in weights if weight not in self.amax]
        if missing:
            raise BuildError(
                f"the calibration has nothing for {missing[0]}",
                "calibrate the model that is built, all of it",
            )
        return max(self.amax[weight] for weight in weights) / E4M3_MAX


_MAKE_ONE = "make one with `h3compile calibrate`"


def read_calibration(path: Path) -> Calibration:
    """The calibration in the file ``path``; `BuildError` when it cannot be read or holds anything else."""
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise BuildError(f"no calibration at {path}", _MAKE_ONE) from error
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path} is no calibration ({error})", _MAKE_ONE) from error
    of_format = isinstance(record, dict) and record.get("format") == FORMAT
    amax, partition = (record.get("amax"), record.get("partition")) if of_format else (None, None)
    if not isinstance(amax, dict) or not isinstance(partition, str | None):
        raise BuildError(f"{path} is no calibration of format {FORMAT}", _MAKE_ONE)
    for name, value in amax.items():
        if not _usable(value):
            raise BuildError(f"{path} is no calibration, with {value!r:.40} for {name}", _MAKE_ONE)
    return Calibration({name: float(value) for name, value in amax.items()}, partition)


def write_calibration(path: Path, calibration: Calibration, **about: str) -> None:
    """Write ``calibration`` to ``path``, whole or not at all; ``about`` says what it was made from.

    Raises `BuildError` where there is no room or no permission.
    """
    record: dict[str, object] = {"format": FORMAT, **about}
    if calibration.partition is not None:
        record["partition"] = calibration.partition
    record["amax"] = dict(sorted(calibration.amax.items()))
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise BuildError(f"cannot write {path} ({error.strerror})", "choose another place") from error
    finally:
        partial.unlink(missing_ok=True)


# Of such an amax neither the scale nor its reciprocal leaves float32.
_SMALLEST, _LARGEST = 1e-30, 1e30


def _usable(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _SMALLEST <= value <= _LARGEST
