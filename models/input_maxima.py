"""The largest magnitude at the input of linears, collected by NVIDIA ModelOpt.

Import this only where a model is calibrated: ModelOpt is an extra, and takes seconds to load.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.calib import MaxCalibrator
from modelopt.torch.quantization.nn import TensorQuantizer
from torch import nn

from h3compile.errors import H3CompileError

__all__ = ["input_maxima"]

_QUANTIZER = "input_quantizer"
_E4M3 = (4, 3)


class _InputMaximum(MaxCalibrator):  # type: ignore[misc]
    """ModelOpt's running maximum over a whole tensor, which can say whose input is not finite."""

    def __init__(self, linear: str) -> None:
        super().__init__(num_bits=_E4M3, axis=None)
        self._linear = linear

    def collect(self, x: torch.Tensor) -> None:
        try:
            super().collect(x)
        except AssertionError as error:  # how ModelOpt refuses infinities and NaN
            raise _not_finite(self._linear) from error


def input_maxima(
    model: nn.Module, linears: Collection[str], forward_loop: Callable[[nn.Module], None]
) -> dict[str, float]:
    """The largest input magnitude of each of ``linears`` while ``forward_loop`` runs ``model``.

    Args:
        model: changed in place, its outputs are not: nothing is quantized while ModelOpt collects. Not to
            be used again, as it quantizes the inputs afterwards.
        linears: names of the modules to watch; of the others nothing is collected.
        forward_loop: runs the model as often as it wants to.

    Raises:
        H3CompileError: an input was not finite, zero throughout, or never there; ModelOpt did not take the
            configuration as it is meant.
    """
    config = {
        # Off is the rule. Weights, too: they get a scale an output channel from their values, at build.
        "quant_cfg": [{"quantizer_name": "*", "enable": False}, *map(_entry, linears)],
        "algorithm": None,
    }
    # It prints how many quantizers it has inserted, where our results go.
    with contextlib.redirect_stdout(io.StringIO()):
        mtq.quantize(model, config)
    _check_switched_on(model, linears)
    mtq.calibrate(model, "max", forward_loop=forward_loop)
    return {linear: _maximum(linear, model.get_submodule(f"{linear}.{_QUANTIZER}")) for linear in linears}


def _entry(linear: str) -> dict[str, object]:
    """By its whole name: the patterns of ModelOpt's own configurations know other models."""
    calibrator = (_InputMaximum, (linear,))
    return {
        "quantizer_name": f"{linear}.{_QUANTIZER}",
        "cfg": {"num_bits": _E4M3, "axis": None, "calibrator": calibrator},
    }


def _check_switched_on(model: nn.Module, linears: Collection[str]) -> None:
    """Entries that match nothing are not an error to ModelOpt; nor is a plugin that switches more on."""
    modules = model.named_modules()
    on = {name for name, module in modules if isinstance(module, TensorQuantizer) and module.is_enabled}
    wrong = on.symmetric_difference(f"{linear}.{_QUANTIZER}" for linear in linears)
    if wrong:
        name = min(wrong)
        raise H3CompileError(
            f"ModelOpt {'watches' if name in on else 'does not watch'} {name.removesuffix(f'.{_QUANTIZER}')}",
            "pip install 'h3compile[calibrate]' for the version that is known to work",
        )


def _maximum(linear: str, quantizer: TensorQuantizer) -> float:
    if quantizer.amax is None:
        raise H3CompileError(f"no request has reached {linear}", "calibrate with a request that does")
    maximum = float(quantizer.amax)
    if maximum == 0:
        raise H3CompileError(f"the input of {linear} is zero throughout", "calibrate with other requests")
    if not maximum < float("inf"):
        raise _not_finite(linear)
    return maximum


def _not_finite(linear: str) -> H3CompileError:
    return H3CompileError(f"the input of {linear} is not finite", "check the checkpoint")
