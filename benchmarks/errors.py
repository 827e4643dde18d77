"""How far the lossy operators are from float64, by kind of input; needs no GPU.

The references are evaluated, which do the arithmetic of the kernels (tests/gpu holds the two together).
Inputs: Gaussian; Gaussian with strong key-channel outliers and a key mean (rows with strong channels for
linears); and what the tiny model computes in its last block during a request.

    python benchmarks/errors.py --out results
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

import h3compile.ops  # noqa: F401  registers the operators

ours = torch.ops.h3compile
ROWS, HEADS, WIDTH = 2048, 4, 128
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.double().transpose(1, 2) for part in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def gaussian(seed: int = 0) -> Triple:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(3, 1, ROWS, HEADS, WIDTH, generator=generator).bfloat16()
    return parts[0], parts[1], parts[2]


def outliers(seed: int = 0) -> Triple:
    """Four key channels ten times the others, and a key mean of the size of a key."""
    query, key, value = (part.float() for part in gaussian(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    key[..., ::32] *= 10
    key += torch.randn(1, 1, HEADS, WIDTH, generator=generator) * 2
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def local(seed: int = 0) -> Triple:
    """Queries that look at the keys around them, as video does: most tiles far away add nothing."""
    query, key, value = (part.float() for part in gaussian(seed))
    generator = torch.Generator().manual_seed(seed + 2)
    shared = torch.randn(1, ROWS // 128, HEADS, WIDTH, generator=generator).repeat_interleave(128, 1)
    return (query + 2 * shared).bfloat16(), (key + 2 * shared).bfloat16(), value.bfloat16()


def captured() -> tuple[dict[str, Triple], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Operands of attention, and inputs and weights of linears, in the tiny model's last block."""
    from diffusers import MiniMaxH3Transformer3DModel

    from h3compile.models.generate import generate, load_pipeline
    from h3compile.models.request import Request
    from h3compile.models.tiny import write_tiny

    attentions: dict[str, Triple] = {}
    linears: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tiny"
        write_tiny(root)
        pipe = load_pipeline(root, from_checkpoint=("transformer",), device="cpu")
        model: MiniMaxH3Transformer3DModel = pipe.transformer
        block = model.transformer_blocks[-1]
        for name, module in block.named_modules():
            if isinstance(module, torch.nn.Linear) and "adaln" not in name:
                weight = module.weight.detach()
                module.register_forward_hook(
                    lambda _, inputs, __, name=name, weight=weight: linears.update(
                        {name: (inputs[0].detach().clone(), weight)}
                    )
                )
        attend = torch.nn.functional.scaled_dot_product_attention

        def recording(query, key, value, **options):  # type: ignore[no-untyped-def]
            parts = [part.detach().transpose(1, 2).bfloat16() for part in (query, key, value)]
            attentions["tiny"] = (parts[0], parts[1], parts[2])
            return attend(query, key, value, **options)

        # The last call is the last block's, in the last step.
        torch.nn.functional.scaled_dot_product_attention = recording
        try:
            request, _ = Request(
                prompt="a kite over the dunes", width=96, height=64, steps=4, seed=1
            ).resolve()
            generate(pipe, request)
        finally:
            torch.nn.functional.scaled_dot_product_attention = attend
    return attentions, linears


def attention_errors(cases: dict[str, Triple]) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}

    def note(row: str, case: str, value: torch.Tensor, exact: torch.Tensor) -> None:
        table.setdefault(row, {})[case] = distance(value, exact)

    for case, parts in cases.items():
        exact = exact_attention(*parts)
        note("dense, BF16", case, ours.attention(*parts), exact)
        kinds = [(qk, block) for qk in ("fp8_e4m3", "int8") for block in (16, 64, 128)] + [("fp8_e4m3", 0)]
        for qk, k_block in kinds:
            for smooth in (True, False):
                operands = ours.sage_prepare.separate(*parts, qk, k_block, smooth)
                out = ours.sage_attention(*operands, k_block, torch.bfloat16)
                shared = f"{k_block} keys a scale" if k_block else "one scale a tensor"
                mean = "removed" if smooth else "kept"
                note(f"sage {qk}, {shared}, mean {mean}", case, out, exact)
        for threshold in (0.05, 1.0, 50.0):
            out, counts = ours.attention.skip(*parts, threshold)
            note(f"skip, threshold {threshold:g}", case, out, exact)
            share = float(counts[0] / counts[1])
            table.setdefault(f"skip, threshold {threshold:g}: tiles skipped", {})[case] = share
        operands = ours.sage_prepare.separate(*parts, "fp8_e4m3", 128, True)
        out, _ = ours.sage_attention.skip(*operands, 128, torch.bfloat16, 0.05)
        note("sage fp8_e4m3 with skip, threshold 0.05", case, out, exact)
    return table


def linear_errors(tiny: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(512, 1024, generator=generator).bfloat16()
    weight = (torch.randn(1024, 1024, generator=generator) * 0.02).bfloat16()
    strong = x.clone()
    strong[:, ::61] *= 20
    cases = {"Gaussian": (x, weight), "strong channels": (strong, weight)}
    cases |= {f"tiny model, {name}": pair for name, pair in tiny.items()}
    table: dict[str, dict[str, float]] = {}
    for case, (rows, matrix) in cases.items():
        rows = rows.reshape(-1, rows.shape[-1])
        exact = rows.double() @ matrix.double().T
        scale = matrix.abs().amax(1).float() / 448
        values = (matrix.float() / scale[:, None]).to(torch.float8_e4m3fn)
        static = (rows.abs().amax().float() / 448).reshape(1)
        found = {"bf16": torch.nn.functional.linear(rows, matrix)}
        for name, given in (("fp8, dynamic", None), ("fp8, calibrated", static)):
            x8, x_scale = ours.quantize_rows(rows, given)
            found[name] = ours.linear_fp8(x8, x_scale, values, scale, None, torch.bfloat16)
        table[case] = {name: distance(value, exact) for name, value in found.items()}
    return table


def markdown(table: dict[str, dict[str, float]], head: str) -> str:
    columns = list(next(iter(table.values())))
    lines = [f"| {head} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for row, cells in table.items():
        shown = [f"{cells[c]:.1%}" if "skipped" in row else f"{cells[c]:.2e}" for c in columns]
        lines.append(f"| {row} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    options.out.mkdir(parents=True, exist_ok=True)
    attentions, linears = captured()
    cases = {
        "Gaussian": gaussian(),
        "outliers and mean": outliers(),
        "local": local(),
        "tiny model": attentions["tiny"],
    }
    result = {"attention": attention_errors(cases), "linear": linear_errors(linears)}
    (options.out / "errors.json").write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result["attention"], "attention"), markdown(result["linear"], "linear"), sep="\n\n")


if __name__ == "__main__":
    main()
