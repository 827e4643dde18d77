"""SAGE by cuDNN and FlashInfer without a GPU: who serves what, and what those libraries are given.

The libraries are stood in for by functions that compute from what they are given, by the meaning that their
interfaces give to it; where the real ones are installed, the calls are held against their signatures.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from packaging.version import Version

import h3compile.ops.package as package
import h3compile.ops.sage_cudnn as sage_cudnn
from h3compile.ops import OPERATORS, Operator
from h3compile.ops.kernels.compile import compile_spec
from h3compile.ops.launch import Launch, Run
from h3compile.ops.numerics import FP8
from h3compile.ops.operator import Operand, Provider
from h3compile.ops.package import Package
from h3compile.ops.sage_layout import rows_first, value_rows
from h3compile.ops.sage_quantized import quantized

Outputs = tuple[torch.Tensor, ...]

D, HEADS = 128, 3
# A 16-bit result is rounded once, and once more where values are scaled after.
ROUNDED = 4e-3
ROUNDED_TO_E4M3 = 4e-2
CALLS = {
    "SAGE": ("fp8_e4m3", 16),
    "SAGE, coarse": ("fp8_e4m3", 128),
    "INT8": ("int8", 64),
    "one scale": ("fp8_e4m3", 0),
}


def provider(name: str, operator: str = "sage_attention.default") -> Provider:
    found: Operator = next(one for one in OPERATORS if one.name == operator)
    return next(one for one in found.providers if one.name == name)


def operands(rows: int, qk: str, k_block: int, valid: int | None = None, poison: bool = False) -> Outputs:
    generator = torch.Generator().manual_seed(rows)
    query, key, value = (torch.randn(rows, HEADS, D, generator=generator) for _ in range(3))
    q, q_scale, k, k_scale, v, v_scale = quantized(query, key * 2, value, qk, k_block, True, valid)
    if poison and valid is not None:
        for values in (q, k):
            values[:, valid:] = torch.nan if values.dtype == FP8 else 127
        if k_block:
            q_scale[:, valid:] = torch.nan
            k_scale[:, -(-valid // k_block) :] = torch.nan
    return q, q_scale, k, k_scale, v, v_scale


def plain(rows: int, qk: str, k_block: int, valid: int | None = None) -> Outputs:
    """Dequantized q, k, v [heads, rows, D] in float64, and v as it was stored."""
    q, q_scale, k, k_scale, v, v_scale = operands(rows, qk, k_block, valid)
    count = rows if valid is None else valid
    k_rows = k_scale.repeat_interleave(k_block, 1)[:, :rows, None] if k_block else k_scale
    order = torch.arange(16).reshape(2, 4, 2).permute(1, 0, 2).flatten().argsort()
    stored = v.double().reshape(HEADS, D, -1, 16)[..., order].flatten(2).mT[:, :rows]
    parts = (q.double() * (q_scale[..., None] if k_block else q_scale), k.double() * k_rows)
    return tuple(part[:, :count] for part in (*parts, stored * v_scale[:, None], stored))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = D**-0.5) -> torch.Tensor:
    """[rows, heads, D] from [heads, rows, D]."""
    return ((q @ k.mT * scale).softmax(-1) @ v).transpose(0, 1)


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 17, 128, 300])
def test_values_in_order(rows: int, interpreter_run: Run) -> None:
    q, _, _, _, v, _ = operands(rows, "fp8_e4m3", 0)
    stored = plain(rows, "fp8_e4m3", 0)[3]
    assert torch.equal(value_rows(interpreter_run, v, rows).double(), stored.transpose(0, 1))
    for count in (1, rows):
        first = rows_first(q, count)
        assert first.is_contiguous()
        assert torch.equal(first.double(), q[:, :count].transpose(0, 1).double())


def test_the_kernel_compiles_everywhere() -> None:
    launches: list[Launch] = []
    value_rows(launches.append, torch.empty(56, D, 256, dtype=FP8, device="meta"), 200)
    (launch,) = launches
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        assert compile_spec(launch.spec, arch).code


# --- who serves what

ON_HOPPER = "on sm_90a it takes one scale a head: sage(q_block=0,k_block=0)"
ONE_SCALE = "cuDNN takes one scale a tensor: sage(q_block=0,k_block=0)"
NO_INT8 = "its kernels with INT8 keys are for sm_100a"
ELSEWHERE = {
    "cudnn": "cuDNN's FP8 attention is known on sm_90a, sm_100a, sm_103a",
    "flashinfer": "it has such attention for sm_90a, sm_100a and sm_103a",
}
MATRIX = [
    ("flashinfer", "sm_90a", "one scale", None),
    ("flashinfer", "sm_90a", "SAGE", ON_HOPPER),
    ("flashinfer", "sm_90a", "INT8", ON_HOPPER),
    ("flashinfer", "sm_100a", "one scale", None),
    ("flashinfer", "sm_100a", "SAGE", None),
    ("flashinfer", "sm_100a", "SAGE, coarse", None),
    ("flashinfer", "sm_100a", "INT8", None),
    ("flashinfer", "sm_103a", "SAGE", None),
    ("flashinfer", "sm_103a", "INT8", NO_INT8),
    ("cudnn", "sm_90a", "one scale", None),
    ("cudnn", "sm_100a", "one scale", None),
    ("cudnn", "sm_103a", "one scale", None),
    ("cudnn", "sm_103a", "SAGE", ONE_SCALE),
    ("cudnn", "sm_90a", "INT8", ONE_SCALE),
    *((name, arch, "one scale", ELSEWHERE[name]) for name in ELSEWHERE for arch in ("sm_89", "sm_120a")),
]


@pytest.mark.parametrize(("name", "arch", "call", "reason"), MATRIX)
def test_who_serves_what(name: str, arch: str, call: str, reason: str | None) -> None:
    qk, k_block = CALLS[call]
    made = operands(20, qk, k_block)
    assert provider(name).illegal(arch, *made, k_block, torch.bfloat16) == reason


@pytest.mark.parametrize("name", ["cudnn", "flashinfer"])
def test_sixteen_bits_of_one_kind_and_heads_of_one_width(name: str) -> None:
    made = operands(20, "fp8_e4m3", 0)
    illegal = provider(name).illegal
    assert illegal("sm_100a", *made, 0, torch.float16) == "its result is bfloat16, not float16"
    narrow = (made[0][..., :64], *made[1:])
    assert str(illegal("sm_100a", *narrow, 0, torch.bfloat16)).startswith("heads have 64 channels")


def test_flashinfer_counts_no_tiles() -> None:
    skipping = provider("flashinfer", "sage_attention.skip")
    made = (*operands(20, "fp8_e4m3", 16), 16, torch.bfloat16)
    assert skipping.illegal("sm_103a", *made, 1.0) == "it does not count the tiles that it skips"
    assert skipping.illegal("sm_103a", *made, 0.0) is None


# --- packages

Installed = Callable[..., None]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """A function that makes an environment with the given distributions, and no others."""
    import h3compile.ops.sage_flashinfer as sage_flashinfer

    def made(**versions: str) -> None:
        known = {name.replace("_", "-"): Version(found) for name, found in versions.items()}
        for module in (package, sage_flashinfer):
            monkeypatch.setattr(module, "installed", known.get)

    return made


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "some-package is not installed"),
        ("1.1", "some-package is 1.1, and versions from 1.2 to below 2 are known"),
        ("2.0.1", "some-package is 2.0.1, and versions from 1.2 to below 2 are known"),
        ("1.2", None),
        ("1.9.post1+cu130", None),
    ],
)
def test_a_package_is_usable_or_says_why_not(
    version: str | None, reason: str | None, environment: Installed
) -> None:
    environment(**({} if version is None else {"some_package": version}))
    found = Package("some-package", "1.2", "2")
    assert found.unusable() == reason
    assert found.pinned == ("some-package" if version is None else f"some-package=={version}")


def test_the_version_is_read_and_nothing_imported() -> None:
    assert package.installed("torch") == Version(Version(torch.__version__).public)
    assert package.installed("no-such-distribution") is None


def refused(name: str, arch: str, call: str, *, named: bool) -> str | None:
    qk, k_block = CALLS[call]
    made: tuple[Operand, ...] = (*operands(20, qk, k_block), k_block, torch.bfloat16)
    return provider(name).refused(arch, made, named=named)


WHEELS = {"flashinfer_python": "0.7.4", "flashinfer_jit_cache": "0.7.4+cu130", "flashinfer_cubin": "0.7.4"}


def test_what_compiles_where_it_runs_must_be_named(environment: Installed) -> None:
    environment()
    for named in (True, False):
        told = refused("flashinfer", "sm_103a", "SAGE", named=named)
        assert told == "flashinfer-python is not installed"
    for missing in ("flashinfer_jit_cache", "flashinfer_cubin"):
        for other in ({}, {missing: "0.7.3"}):
            environment(**{name: found for name, found in WHEELS.items() if name != missing} | other)
            told = refused("flashinfer", "sm_103a", "SAGE", named=False)
            assert told is not None and told.startswith(f"without {missing.replace('_', '-')} of its version")
            assert refused("flashinfer", "sm_103a", "SAGE", named=True) is None
    environment(**WHEELS)
    assert refused("flashinfer", "sm_103a", "SAGE", named=False) is None
    # The kernel of FlashAttention 3 that is called is in no wheel.
    assert "compiles this kernel" in str(refused("flashinfer", "sm_90a", "one scale", named=False))
    assert refused("flashinfer", "sm_90a", "one scale", named=True) is None


def test_what_rounds_more_must_be_named(environment: Installed) -> None:
    environment(nvidia_cudnn_frontend="1.32.0")
    assert refused("cudnn", "sm_90a", "one scale", named=False) == "on sm_90a cuDNN rounds its result to E4M3"
    assert refused("cudnn", "sm_90a", "one scale", named=True) is None
    assert refused("cudnn", "sm_100a", "one scale", named=False) is None


# --- what FlashInfer is given

Calls = list[dict[str, object]]


def tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def trtllm(calls: Calls) -> Callable[..., None]:
    """As ``trtllm_ragged_attention_deepseek``: a scale a query row and a key block besides ``bmm1_scale``."""

    def attend(**given: object) -> None:
        calls.append(given)
        query, key, value, out = (tensor(given[name]) for name in ("query", "key", "value", "out"))
        rows = query.shape[0]
        ends = [tensor(given[f"cum_seq_lens_{of}"]).tolist() for of in ("q", "kv")]
        assert ends == [[0, rows], [0, rows]]
        assert tensor(given["seq_lens"]).tolist() == [rows]
        assert given["max_q_len"] == given["max_kv_len"] == rows
        assert all(part.is_contiguous() and part.shape == (rows, HEADS, D) for part in (query, key, value))
        assert not tensor(given["workspace_buffer"]).any()
        q, k, v = (part.double().transpose(0, 1) for part in (query, key, value))
        q_sfs, k_sfs, p_sfs, v_sfs = given.get("sage_attn_sfs", (None,) * 4)  # type: ignore[misc]
        if q_sfs is not None:
            assert given["num_elts_per_sage_attn_blk"] == (1, 16, 0, 1)
            assert p_sfs is None
            assert q_sfs.shape == (HEADS, rows) and k_sfs.shape == (HEADS, -(-rows // 16))
            assert all(scales.is_contiguous() for scales in (q_sfs, k_sfs, v_sfs))
            q, k = q * q_sfs[..., None], k * k_sfs.repeat_interleave(16, 1)[:, :rows, None]
            v = v * v_sfs[:, None]
        out.copy_(attention(q, k, v, float(given["bmm1_scale"])) * float(given["bmm2_scale"]))  # type: ignore[arg-type]

    return attend


def fa3(calls: Calls) -> Callable[..., torch.Tensor]:
    """As ``single_prefill_with_kv_cache`` with E4M3 operands: a scale a head."""

    def attend(*given: torch.Tensor, o_dtype: torch.dtype, causal: bool, backend: str) -> torch.Tensor:
        calls.append({"o_dtype": o_dtype, "causal": causal, "backend": backend})
        assert (causal, backend) == (False, "fa3")
        q, k, v = (part.double().transpose(0, 1) for part in given[:3])
        q, k, v = (part * scale[:, None, None] for part, scale in zip((q, k, v), given[3:], strict=True))
        return attention(q, k, v).to(o_dtype)

    return attend


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands for the package; the keywords that it was called with."""
    calls: Calls = []
    module, prefill = ModuleType("flashinfer"), ModuleType("flashinfer.prefill")
    module.single_prefill_with_kv_cache = fa3(calls)  # type: ignore[attr-defined]
    prefill.trtllm_ragged_attention_deepseek = trtllm(calls)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", module)
    monkeypatch.setitem(__import__("sys").modules, "flashinfer.prefill", prefill)
    return calls


@pytest.mark.parametrize(("rows", "valid"), [(300, None), (300, 190), (129, 17)])
@pytest.mark.parametrize(
    ("arch", "call"), [("sm_100a", call) for call in CALLS] + [("sm_90a", "one scale")], ids="-".join
)
def test_flashinfer_is_given_the_same_numbers(
    arch: str, call: str, rows: int, valid: int | None, interpreter_run: Run, flashinfer: Calls
) -> None:
    qk, k_block = CALLS[call]
    made = operands(rows, qk, k_block, valid, poison=True)
    out = provider("flashinfer").launch(interpreter_run, arch, *made, k_block, torch.bfloat16, valid)
    q, k, v, _ = plain(rows, qk, k_block, valid)
    count = rows if valid is None else valid
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, rows, HEADS, D) and out.dtype == torch.bfloat16
    assert apart(out[0, :count], attention(q, k, v)) < ROUNDED
    assert not bool(out[:, count:].any())
    assert len(flashinfer) == 1


def test_a_threshold_of_zero_counts_every_tile(interpreter_run: Run, flashinfer: Calls) -> None:
    made = operands(300, "fp8_e4m3", 16, 190)
    skipping = provider("flashinfer", "sage_attention.skip")
    found = skipping.launch(interpreter_run, "sm_103a", *made, 16, torch.bfloat16, 0.0, 190)
    out = provider("flashinfer").launch(interpreter_run, "sm_103a", *made, 16, torch.bfloat16, 190)
    assert torch.equal(found[0], tensor(out))
    assert found[1].tolist() == [0, HEADS * 3 * 2]


# --- what cuDNN is given


class Tensor:
    """A tensor of a graph: what was declared of it."""

    def __init__(self, dim: list[int], stride: list[int], data_type: torch.dtype) -> None:
        self.dim, self.stride, self.data_type, self.output = dim, stride, data_type, False

    def set_output(self, value: bool) -> Tensor:
        self.output = value
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def set_data_type(self, kind: torch.dtype) -> Tensor:
        self.data_type = kind
        return self

    def check(self, data: torch.Tensor) -> None:
        assert list(data.shape) == self.dim
        assert data.dtype == self.data_type
        # A dimension of one has no stride.
        steps = zip(data.shape, data.stride(), self.stride, strict=True)
        assert all(size == 1 or own == declared for size, own, declared in steps)


class Graph:
    """As ``cudnn.pygraph``: E4M3 attention with scales of one number."""

    built = 0

    def __init__(self, handle: object, **types: torch.dtype) -> None:
        self.ready = False

    def tensor(self, dim: list[int], stride: list[int], data_type: torch.dtype) -> Tensor:
        return Tensor(dim, stride, data_type)

    def sdpa_fp8(self, *, generate_stats: bool, attn_scale: float, use_causal_mask: bool, **given: Tensor):  # type: ignore[no-untyped-def]
        assert not generate_stats and not use_causal_mask
        self.given, self.scale = given, attn_scale
        self.out, self.maxima = Tensor([], [], FP8), [Tensor([], [], torch.float32) for _ in range(2)]
        return [self.out, None, *self.maxima]

    def build(self, heuristics: list[object]) -> None:
        rows = self.given["q"].dim[2]
        assert rows > 1, "cuDNN has no plan for one query on Hopper"
        self.ready = True
        Graph.built += 1

    def get_workspace_size(self) -> int:
        return 256

    def execute(self, tensors: dict[Tensor, torch.Tensor], workspace: torch.Tensor, handle: object) -> None:
        assert self.ready and workspace.nbytes == 256
        assert tensors.keys() == {*self.given.values(), self.out, *self.maxima}
        for declared, data in tensors.items():
            declared.check(data)
        data = {name: tensors[one].double() for name, one in self.given.items()}
        assert float(data["scale_s"] * data["descale_s"]) == pytest.approx(1)
        q, k, v = (data[name][0] * data[f"descale_{name}"].item() for name in ("q", "k", "v"))
        result = attention(q, k, v, self.scale).transpose(0, 1) * data["scale_o"].item()
        tensors[self.out].copy_(result[None].to(self.out.data_type))


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Graph]]:
    """Stands for the package, on a device that is not there."""
    kinds = SimpleNamespace(FP8_E4M3=FP8, FLOAT=torch.float32, BFLOAT16=torch.bfloat16)
    module = ModuleType("cudnn")
    vars(module).update(
        data_type=kinds,
        heur_mode=SimpleNamespace(A="A"),
        pygraph=Graph,
        create_handle=object,
        set_stream=lambda *, handle, stream: None,
    )
    monkeypatch.setitem(__import__("sys").modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(Graph, "built", 0)
    yield Graph
    sage_cudnn._plan.cache_clear()
    sage_cudnn._handle.cache_clear()


@pytest.mark.parametrize(("rows", "valid"), [(300, None), (300, 190), (129, 17), (40, 1), (1, None)])
@pytest.mark.parametrize(("arch", "bound"), [("sm_90a", ROUNDED_TO_E4M3), ("sm_103a", ROUNDED)])
def test_cudnn_is_given_the_same_numbers(
    arch: str, bound: float, rows: int, valid: int | None, interpreter_run: Run, cudnn: type[Graph]
) -> None:
    made = operands(rows, "fp8_e4m3", 0, valid, poison=True)
    out = tensor(provider("cudnn").launch(interpreter_run, arch, *made, 0, torch.bfloat16, valid))
    q, k, v, _ = plain(rows, "fp8_e4m3", 0, valid)
    count = rows if valid is None else valid
    assert out.shape == (1, rows, HEADS, D) and out.dtype == torch.bfloat16
    assert apart(out[0, :count], attention(q, k, v)) < bound
    assert not bool(out[:, count:].any())


def test_a_plan_is_built_once_a_length_and_few_are_kept(interpreter_run: Run, cudnn: type[Graph]) -> None:
    made = operands(20, "fp8_e4m3", 0)

    def attend(valid: int) -> None:
        provider("cudnn").launch(interpreter_run, "sm_90a", *made, 0, torch.bfloat16, valid)

    for valid in (20, 19, 20, 19):
        attend(valid)
    assert cudnn.built == 2
    for valid in range(2, 19):
        attend(valid)
    assert sage_cudnn._plan.cache_info().currsize == 8


@pytest.mark.parametrize("name", ["cudnn", "flashinfer"])
def test_a_build_notes_the_kernel_and_calls_no_library(name: str) -> None:
    launches: list[Launch] = []
    made = tuple(part.to("meta") for part in operands(20, "fp8_e4m3", 0))
    out = tensor(provider(name).launch(launches.append, "sm_90a", *made, 0, torch.bfloat16, None))
    assert out.is_meta and out.shape == (1, 20, HEADS, D)
    assert [launch.spec.kernel for launch in launches] == ["sage_layout:value_rows_kernel"]


# --- the real libraries


def signature(source: Path, function: str) -> set[str]:
    """The parameters of the last definition of ``function``, without importing what needs a GPU."""
    found = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    arguments = found[-1].args
    return {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}


def test_the_calls_fit_the_flashinfer_that_is_installed(interpreter_run: Run, request) -> None:  # type: ignore[no-untyped-def]
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer-python is not installed")
    calls: Calls = request.getfixturevalue("flashinfer")
    source = Path(spec.origin).parent / "prefill.py"
    for arch, call, function in (
        ("sm_103a", "SAGE", "trtllm_ragged_attention_deepseek"),
        ("sm_103a", "one scale", "trtllm_ragged_attention_deepseek"),
        ("sm_90a", "one scale", "single_prefill_with_kv_cache"),
    ):
        qk, k_block = CALLS[call]
        made = operands(20, qk, k_block)
        provider("flashinfer").launch(interpreter_run, arch, *made, k_block, torch.bfloat16, None)
        assert calls.pop().keys() <= signature(source, function)


@pytest.mark.parametrize("result", [FP8, torch.bfloat16])
def test_the_cudnn_that_is_installed_accepts_the_graph(result: torch.dtype) -> None:
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed", exc_type=ImportError)
    described = sage_cudnn.Described(56, 37_700, 37_760 * D, result, None)
    described.graph.validate()
    assert len(described.maxima) == 2
