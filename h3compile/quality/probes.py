"""The work that a device's ceilings are read from: copies, products, attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from h3compile.errors import H3CompileError
from h3compile.ops.attention import ATTENTION, HEAD_DIM
from h3compile.ops.cubin import Kernels
from h3compile.ops.launch import Binary, Launch, Run
from h3compile.ops.linear_fp8 import LINEAR_FP8
from h3compile.ops.numerics import FP8
from h3compile.ops.operator import Operand, Operator, Outputs
from h3compile.ops.sage_attention import SAGE_ATTENTION
from h3compile.ops.sage_prepare import SAGE_PREPARE
from h3compile.quality.clock import Work
from h3compile.targets.keys import default_keys

__all__ = ["Compiling", "Probe", "attention", "copy", "linears", "sage"]

_SAGE_TYPES = {"float8_e4m3fn": "fp8_e4m3", "int8": "int8"}


@dataclass(frozen=True)
class Probe:
    """Work, and how much of it there is: FLOP or bytes; ``how`` says what does it.

    ``make`` allocates what the work needs, which is freed with what it returns.
    """

    how: str
    amount: float
    make: Callable[[], Work]


class Compiling:
    """Executes launches of our kernels, compiling each variant when it is first launched."""

    def __init__(self, arch: str, device: torch.device, folder: Path) -> None:
        self._arch = arch
        self._device = device
        self._folder = folder
        self._ready: dict[str, Kernels] = {}

    def __call__(self, launch: Launch) -> None:
        """Enqueue ``launch``; `BuildError` when Triton cannot compile it."""
        key = launch.spec.key
        if key not in self._ready:
            # Here and not above: a machine without a GPU has no Triton, and no kernels to compile.
            from h3compile.ops.kernels.compile import compile_spec

            fields = asdict(compile_spec(launch.spec, self._arch))
            file = self._folder / key
            file.write_bytes(fields.pop("code"))
            self._ready[key] = Kernels({key: Binary(file=file, **fields)}, self._device)
        self._ready[key](launch)


def copy(nbytes: int, source: torch.device, to: torch.device) -> Probe:
    """A copy of ``nbytes`` random bytes, out of the host from pinned memory; each byte counts once."""

    def make() -> Work:
        pinned = source.type == "cpu" and to.type == "cuda"
        data = torch.empty(nbytes, dtype=torch.uint8, device=source, pin_memory=pinned).random_()
        room = torch.empty(nbytes, dtype=torch.uint8, device=to)
        return lambda: room.copy_(data, non_blocking=True)

    return Probe(f"a copy of {nbytes / 1e9:.1f} GB", nbytes, make)


def linears(
    shapes: tuple[tuple[int, int], ...], rows: int, dtype: torch.dtype, device: torch.device
) -> list[Probe]:
    """``rows`` activations times each weight ``(N, K)``, as torch multiplies that type; random operands."""
    multiply = {FP8: _by_scaled_mm, torch.int8: _by_int_mm}.get(dtype, _by_matmul)

    def made(n: int, k: int) -> Callable[[], Work]:
        return lambda: multiply(_random((rows, k), dtype, device), _random((n, k), dtype, device))

    return [Probe("torch", 2.0 * rows * n * k, made(n, k)) for n, k in shapes]


def _random(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Multiplying zeros takes less power, so the clocks would be higher than they are in a model.
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def _by_matmul(x: torch.Tensor, weight: torch.Tensor) -> Work:
    return lambda: torch.nn.functional.linear(x, weight)


def _by_int_mm(x: torch.Tensor, weight: torch.Tensor) -> Work:
    return lambda: torch._int_mm(x, weight.t())


def _by_scaled_mm(x: torch.Tensor, weight: torch.Tensor) -> Work:
    x_scale, weight_scale = (
        torch.rand(shape, device=x.device) for shape in ((x.shape[0], 1), (weight.shape[0],))
    )
    provider = next(one for one in LINEAR_FP8.providers if one.name == "scaled_mm")
    return lambda: provider.launch(_no_kernels, "", x, x_scale, weight, weight_scale, None, torch.bfloat16)


def _no_kernels(launch: Launch) -> None:
    raise AssertionError(f"torch's own product launched {launch.spec.kernel}")


def _flop(rows: int, heads: int) -> float:
    return 4.0 * rows * rows * heads * HEAD_DIM


def attention(rows: int, heads: int, arch: str, device: torch.device, run: Run) -> Iterator[Probe]:
    """Dense attention in BF16 by every provider that is legal."""

    def operands() -> tuple[torch.Tensor, ...]:
        shape = (1, rows, heads, HEAD_DIM)
        return tuple(torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))

    def made(name: str) -> Callable[[], Work]:
        def make() -> Work:
            given = operands()
            return lambda: _launch(ATTENTION, name, run, arch, given)

        return make

    like = (torch.empty(1, 1, heads, HEAD_DIM, dtype=torch.bfloat16, device="meta"),) * 3
    for provider in ATTENTION.providers:
        legal = device.type != "cpu" or provider.name == "sdpa"
        if legal and provider.illegal(arch, *like) is None:
            yield Probe(provider.name, _flop(rows, heads), made(provider.name))


def sage(
    kind: str, rows: int, heads: int, rotated: int, arch: str, device: torch.device, run: Run
) -> Iterator[Probe]:
    """SAGE with operands of ``kind``, quantizing and smoothing included, by every provider that is legal.

    ``rotated`` channels of each head are turned, as they are where its operands are made.
    """
    spelled = _SAGE_TYPES[kind]
    _, block = default_keys(arch)

    def made(name: str) -> Callable[[], Work]:
        def make() -> Work:
            qkv = torch.randn(1, rows, 3 * heads * HEAD_DIM, dtype=torch.bfloat16, device=device)
            norms = [torch.rand(HEAD_DIM, device=device).bfloat16() for _ in range(2)]
            angles = 6.28 * torch.rand(rows, rotated, device=device)
            tables = (angles.cos().bfloat16(), angles.sin().bfloat16())
            before: tuple[Operand, ...] = (qkv, *norms, *tables, heads, 1e-5, spelled, block, True)

            def work() -> object:
                quantized = _launch(SAGE_PREPARE, "triton", run, arch, before)
                assert isinstance(quantized, tuple)
                return _launch(SAGE_ATTENTION, name, run, arch, (*quantized, block, torch.bfloat16))

            return work

        return make

    eight = FP8 if kind == "float8_e4m3fn" else torch.int8
    q = torch.empty(heads, 1, HEAD_DIM, dtype=eight, device="meta")
    scale = torch.empty(heads, 1, dtype=torch.float32, device="meta")
    like = (q, scale, q, scale, q.to(FP8), scale, block, torch.bfloat16)
    for provider in SAGE_ATTENTION.providers:
        if provider.illegal(arch, *like) is None:
            yield Probe(provider.name, _flop(rows, heads), made(provider.name))


def _launch(operator: Operator, name: str, run: Run, arch: str, given: tuple[Operand, ...]) -> Outputs:
    provider = next((one for one in operator.providers if one.name == name), None)
    if provider is None:
        raise H3CompileError(f"{operator.name} has no provider {name}")
    return provider.launch(run, arch, *given)
