"""Small regions with H3's structure, as the pipeline would hand them to a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from h3compile.program.facts import Dim
from h3compile.program.propagate import propagate
from h3compile.program.region import Port, Region

WIDTH, HEADS, HEAD, FFN, ROTARY = 96, 2, 64, 160, 48
DIMS = (Dim("rows", hint=512), Dim("timesteps", hint=2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = x[..., :ROTARY], x[..., ROTARY:]
    first, second = turned.chunk(2, dim=-1)
    flipped = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[None, :, None] + flipped * sin[None, :, None], kept), dim=-1).contiguous()


def block(
    modulation: Tensor,
    hidden: Tensor,
    index: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norm_query: Tensor,
    norm_key: Tensor,
    out: Tensor,
    up: Tensor,
    down: Tensor,
) -> tuple[Tensor, ...]:
    """A transformer block: modulated norms, QK-norm, partial rotation, attention, SwiGLU."""
    shift, scale, gate, shift_ff, scale_ff, gate_ff = modulation.view(-1, 6 * WIDTH).chunk(6, dim=-1)

    def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), norm, 1e-5) * (
            1.0 + scale.index_select(0, index)
        ) + shift.index_select(0, index)

    x = modulated(hidden, scale, shift)
    q, k, v = (F.linear(x, weight).unflatten(-1, (HEADS, -1)) for weight in (query, key, value))
    q = _rotate(F.rms_norm(q, (HEAD,), norm_query, 1e-5), cos, sin)
    k = _rotate(F.rms_norm(k, (HEAD,), norm_key, 1e-5), cos, sin)
    mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
    hidden = hidden + gate.index_select(0, index) * F.linear(mixed.transpose(1, 2).flatten(2, 3), out)
    value_half, gate_half = F.linear(modulated(hidden, scale_ff, shift_ff), up).chunk(2, dim=-1)
    return (hidden + gate_ff.index_select(0, index) * F.linear(value_half * F.silu(gate_half), down),)


Shape = tuple[int | str, ...]

BLOCK_SHAPES: dict[str, Shape] = {
    "modulation": ("timesteps", 18 * WIDTH),
    "hidden": (1, "rows", WIDTH),
    "index": ("rows",),
    "cos": ("rows", ROTARY),
    "sin": ("rows", ROTARY),
    "norm": (WIDTH,),
    "query": (HEADS * HEAD, WIDTH),
    "key": (HEADS * HEAD, WIDTH),
    "value": (HEADS * HEAD, WIDTH),
    "norm_query": (HEAD,),
    "norm_key": (HEAD,),
    "out": (WIDTH, HEADS * HEAD),
    "up": (2 * FFN, WIDTH),
    "down": (WIDTH, FFN),
}


@dataclass(frozen=True)
class Sample:
    """A region and the way to make inputs for it."""

    graph: fx.GraphModule
    shapes: dict[str, Shape]
    dtype: torch.dtype

    def inputs(self, rows: int, timesteps: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        sizes = {"rows": rows, "timesteps": timesteps}
        made = []
        for name, shape in self.shapes.items():
            size = [sizes[dim] if isinstance(dim, str) else dim for dim in shape]
            if name == "index":
                made.append(torch.randint(0, 3 * timesteps, size, generator=generator))
                continue
            tensor = torch.randn(size, generator=generator)
            if name in ("cos", "sin"):
                tensor = torch.cos(3 * tensor)
            elif len(shape) == 2 and name != "modulation":
                tensor = tensor / tensor.shape[-1] ** 0.5
            made.append(tensor.to(self.dtype))
        return made


def sample_of(
    function: Callable[..., tuple[Tensor, ...]],
    shapes: dict[str, Shape],
    dtype: torch.dtype,
    dims: Sequence[Dim] = DIMS,
) -> Sample:
    """Trace ``function`` with every named length free, as `Region` and then as the module of a backend."""
    sizes = {dim.name: 2 * at + 14 for at, dim in enumerate(dims)}
    free = {dim.name: torch.export.Dim(dim.name) for dim in dims}
    examples = [
        torch.zeros(
            [sizes[dim] if isinstance(dim, str) else dim for dim in shape],
            dtype=torch.int64 if name == "index" else dtype,
        )
        for name, shape in shapes.items()
    ]
    dynamic = tuple(
        {at: free[dim] for at, dim in enumerate(s) if isinstance(dim, str)} for s in shapes.values()
    )

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return function(*inputs)

    exported = torch.export.export(Module(), tuple(examples), dynamic_shapes=(dynamic,), strict=False)
    graph = exported.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    ports = tuple(
        Port(name, example.dtype, shape)
        for (name, shape), example in zip(shapes.items(), examples, strict=True)
    )
    for node, port in zip(graph.find_nodes(op="placeholder"), ports, strict=True):
        node.name = node.target = port.name
    (result,) = graph.find_nodes(op="output")
    outputs = tuple(Port(f"out{at}", dtype, ()) for at in range(len(result.args[0])))
    region = Region("sample", graph, ports, (), outputs)
    return Sample(propagate(region, dims).module(), shapes, dtype)


@pytest.fixture(scope="session")
def block_fp32() -> Sample:
    return sample_of(block, BLOCK_SHAPES, torch.float32)


@pytest.fixture(scope="session")
def block_bf16() -> Sample:
    return sample_of(block, BLOCK_SHAPES, torch.bfloat16)
