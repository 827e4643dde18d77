from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from h3compile import load as exported
from h3compile.errors import EngineError, H3CompileError
from h3compile.runtime.load import load
from h3compile.runtime.pool import Pool

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


def test_load_is_what_the_package_exports() -> None:
    assert exported is load


def test_two_partitions_share_what_is_equal(kit, engine: Path) -> None:
    one = load(engine, "cpu")
    other = load(engine, partition="transformer_ref", share=one)
    assert other.pool is one.pool
    weights = [module._parts.weights for module in (one, other)]
    shared = [
        weights[0].resident(name)[0].data_ptr() == weights[1].resident(name)[0].data_ptr()
        for name in ("embed.0", "refine.0", "block.0", "head.0")
    ]
    assert shared == [True, True, False, False]
    executors = [[call.executor for call in m._parts.runner._calls] for m in (one, other)]
    assert executors[0] == executors[1]
    given = kit.inputs()
    assert not torch.equal(one(**given).sample, other(**given).sample)


@pytest.mark.slow
def test_what_was_shared_is_freed_with_its_last_user(engine: Path) -> None:
    pool = Pool()
    one, other = load(engine, share=pool), load(engine, share=pool)
    buffer = weakref.ref(one._parts.weights._buffers["block.0"])
    del one
    gc.collect()
    assert buffer() is not None
    del other
    gc.collect()
    assert buffer() is None


def test_the_digest_that_is_expected_is_checked(engine: Path) -> None:
    digest = load(engine).manifest.digest()
    assert load(engine, expect=digest).partition == "transformer"
    with pytest.raises(EngineError, match="not the expected one"):
        load(engine, expect="0" * 64)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"pending": ("block", "head")},
            r"is not finished: block, head wait for cpu: run `h3compile finalize",
        ),
        ({"weights": "none"}, "holds no weights: build it without --weightless"),
        ({"outputs": ("sample",)}, "is an engine of Toy, which has other inputs"),
        ({"inputs": ()}, "is an engine of Toy, which has other inputs"),
        ({"target": "h200", "arch": "sm_90a"}, r"was built for h200 \(sm_90a\) and cannot run on cpu"),
    ],
)
def test_an_engine_that_cannot_run_here_is_refused(
    kit, tmp_path: Path, changes: dict[str, object], line: str
) -> None:
    path = kit.Toy(changes=changes).write(tmp_path / "a.h3e")
    with pytest.raises(EngineError, match=line):
        load(path, "cpu")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"partition": "transformer_reg"},
            r"no partition 'transformer_reg': did you mean 'transformer_ref'\?",
        ),
        ({"device": "cuda"}, r"was built for cpu \(cpu\) and cannot run on cuda"),
        ({"device": "toaster"}, "'toaster' is not a device"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(engine: Path, arguments: dict[str, str], line: str) -> None:
    with pytest.raises(H3CompileError, match=line):
        load(engine, **arguments)


@no_gpu
def test_an_engine_for_an_absent_gpu_is_refused(kit, tmp_path: Path) -> None:
    path = kit.Toy(changes={"target": "h200", "arch": "sm_90a"}).write(tmp_path / "a.h3e")
    with pytest.raises(H3CompileError, match="built for h200 and this machine has no CUDA devices"):
        load(path)


def test_weights_that_do_not_fit_their_region_are_refused(kit, tmp_path: Path) -> None:
    weights = {call: dict(tensors) for call, tensors in kit.weights().items()}
    weights["block.1"]["weight"] = torch.zeros(8, 9)
    path = kit.Toy(partitions={"transformer": weights}).write(tmp_path / "a.h3e")
    with pytest.raises(EngineError, match=r"the weights of block.1 in transformer do not fit its region"):
        load(path)


def test_an_engine_without_folded_timesteps_evaluates_them(kit, tmp_path: Path) -> None:
    module = load(kit.Toy().write(tmp_path / "a.h3e"), table_bytes=0)
    given = kit.inputs()
    for _ in range(2):
        found = module(**given)
        assert all(map(torch.equal, found, kit.reference(kit.weights(), given)))


# --- on a GPU ---


def on_gpu(kit, path: Path) -> Path:
    major, minor = torch.cuda.get_device_capability()
    changes = {"target": "gpu", "arch": f"sm_{major}{minor}a"}
    return kit.Toy(changes=changes).write(path)


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_it_runs_on_a_gpu_from_host_and_device_tensors(kit, tmp_path: Path, gpu: torch.device) -> None:
    module = load(on_gpu(kit, tmp_path / "a.h3e"))
    assert module.device == gpu and module.to("cuda") is module
    for timesteps in ((0.0,), (0.25, 0.5), [i / 50 for i in range(50)]):
        given = kit.inputs(40, 6, 4, timesteps=timesteps)
        here = module(**given)
        there = module(**{name: value.to(gpu) for name, value in given.items()})
        for one, other, reference in zip(here, there, kit.reference(kit.weights(), given), strict=True):
            assert one.device == gpu and torch.equal(one, other)
            torch.testing.assert_close(one.cpu(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_without_the_memory_is_refused_before_allocating(
    kit, tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = on_gpu(kit, tmp_path / "a.h3e")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    with pytest.raises(H3CompileError, match=r"the engine needs .* on cuda:0, which has 0.00 GiB free"):
        load(path)


def test_a_digest_is_not_expected_of_files_that_nobody_checks(kit, tmp_path: Path) -> None:
    with pytest.raises(H3CompileError, match="vouches for nothing when the files are not verified"):
        load(tmp_path / "a.h3e", expect="0" * 64, verify=False)
