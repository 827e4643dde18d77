"""Launches executed by Triton's interpreter on CPU tensors, in a process of its own.

Triton decides when it is imported whether its functions are compiled or interpreted, so the process that
interprets kernels cannot be one that compiles them.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h3compile.ops.launch import Launch, Run
from h3compile.ops.numerics import E4M3_MAX

__all__ = ["interpreter"]

_VARIABLE = "TRITON_INTERPRET"


# By Triton's names: the dtype of the value, and the one that holds its bits.
_FLOATS = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.uint16),
    "fp16": (torch.float16, torch.uint16),
    "fp32": (torch.float32, torch.uint32),
    "fp64": (torch.float64, torch.uint64),
}


def _converted(values: npt.NDArray[np.generic], source: object, target: object, rounding: object) -> object:
    """The bits of ``values``, floats of Triton dtype ``source``, as ``target``, as a GPU converts them.

    To nearest even, and E4M3 saturates. Triton's own interpreter truncates, or loses the carry into the
    exponent.
    """
    kind, bits = (_FLOATS[str(dtype)] for dtype in (source, target))
    wide = torch.from_numpy(np.ascontiguousarray(values)).view(kind[0]).to(torch.float64)
    if bits[0] == torch.float8_e4m3fn:
        wide = wide.clamp(-E4M3_MAX, E4M3_MAX)
    return wide.to(bits[0]).view(bits[1]).numpy()


def _serve(connection: Connection) -> None:
    """Execute the launches that come in; answer each with ``None``, or with what went wrong."""
    torch.set_num_threads(1)
    from triton.runtime import interpreter as triton_interpreter

    from h3compile.ops.kernels.compile import function_of

    assert hasattr(triton_interpreter, "_convert_float")
    triton_interpreter._convert_float = _converted
    patch_tensor = triton_interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:  # a class of the interpreter's that has no stub
        patch_tensor(tensor, scope)
        # Triton 3.6 holds a number as an array of one element, which newer numpy makes no number of.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    triton_interpreter._patch_lang_tensor = patched
    while (launch := connection.recv()) is not None:
        spec = launch.spec
        names = [name for name, _ in spec.types]
        arguments = dict(zip(names, launch.arguments, strict=True))
        try:
            function_of(spec)[launch.grid](**arguments, **dict(spec.constants))
        except BaseException:
            connection.send(traceback.format_exc())
        else:
            connection.send(None)


@contextmanager
def _interpreting() -> Iterator[None]:
    """For children started inside: the parent's main module, which they import, may import Triton."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


@contextmanager
def interpreter() -> Iterator[Run]:
    """A function that executes launches; outputs are written to the launch's own CPU tensors.

    Slow: every program of the grid runs in numpy. Raises `RuntimeError` with the traceback when a kernel
    fails.
    """
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_serve, args=(theirs,), daemon=True)
    with _interpreting():
        worker.start()
    theirs.close()

    def run(launch: Launch) -> None:
        # Tensors travel as shared memory: what the worker writes is seen here.
        ours.send(launch)
        failure = ours.recv()
        if failure is not None:
            raise RuntimeError(f"{launch.spec.kernel} failed in the interpreter:\n{failure}")

    try:
        yield run
    finally:
        ours.send(None)
        worker.join()
