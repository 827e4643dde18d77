from __future__ import annotations

from pathlib import Path

import torch

from h3compile.engine.loader import open_engine
from h3compile.runtime.lanes import DONE
from h3compile.runtime.pool import Pool
from h3compile.runtime.weights import DeviceRange, Weights

CPU = torch.device("cpu")
STEP = ("embed.0", "block.0", "block.1", "head.0")


def test_a_range_is_one_aligned_buffer_and_its_weights_are_views(kit, engine: Path) -> None:
    weights = Weights(open_engine(engine), "transformer", CPU, Pool(), STEP)
    proj, audio_proj = weights.resident("embed.0")
    expected = kit.weights(0)["embed.0"]
    assert torch.equal(proj, expected["proj"]) and torch.equal(audio_proj, expected["audio_proj"])
    assert proj.untyped_storage().data_ptr() == audio_proj.untyped_storage().data_ptr()
    assert proj.data_ptr() % 64 == audio_proj.data_ptr() % 64 == 0


def test_equal_ranges_of_two_partitions_are_held_once(engine: Path) -> None:
    folder, pool = open_engine(engine), Pool()
    one = Weights(folder, "transformer", CPU, pool, STEP)
    other = Weights(folder, "transformer_ref", CPU, pool, STEP)
    shared = {name: one.resident(name)[0].data_ptr() == other.resident(name)[0].data_ptr() for name in STEP}
    assert shared == {"embed.0": True, "block.0": False, "block.1": False, "head.0": False}
    ranges = folder.manifest.partitions["transformer"].ranges
    assert one.nbytes == sum(ranges[name].nbytes for name in STEP)


def test_without_a_common_pool_nothing_is_shared(engine: Path) -> None:
    folder = open_engine(engine)
    one, other = (Weights(folder, "transformer", CPU, Pool(), STEP) for _ in range(2))
    assert one.resident("embed.0")[0].data_ptr() != other.resident("embed.0")[0].data_ptr()


def test_cold_ranges_go_through_one_buffer(kit, engine: Path) -> None:
    weights = Weights(open_engine(engine), "transformer", CPU, Pool(), ())
    assert weights.nbytes == 0
    with weights.cold(["mod.0", "mod.1"]) as load:
        first = load("mod.0")[0]
        assert torch.equal(first, kit.weights(0)["mod.0"]["weight"])
        second = load("mod.1")[0]
        assert torch.equal(second, kit.weights(0)["mod.1"]["weight"])
        assert first.data_ptr() == second.data_ptr()
    assert weights.nbytes == 0


def test_a_range_that_comes_later_has_its_place_and_is_filled_once(kit, engine: Path) -> None:
    folder, pool = open_engine(engine), Pool()
    later = Weights(folder, "transformer", CPU, pool, ("embed.0",), later=("block.0",))
    place = later.place("block.0")
    assert later.place("embed.0").filled and not place.filled
    # An engine that wants it at once finds the place, and fills it.
    whole = Weights(folder, "transformer", CPU, pool, STEP)
    assert whole.place("block.0") is place and place.filled
    assert torch.equal(later.resident("block.0")[0], kit.weights(0)["block.0"]["weight"])
    place.fill(lambda data: data.zero_() and DONE)  # too late: the bytes are there
    assert torch.equal(whole.resident("block.0")[0], kit.weights(0)["block.0"]["weight"])


def test_whoever_did_not_bring_the_bytes_waits_for_them() -> None:
    waited: list[str] = []

    class Copying:
        def wait(self) -> None:
            waited.append("copy")

    place = DeviceRange(torch.zeros(4, dtype=torch.uint8))
    place.fill(lambda data: Copying())
    assert waited == []
    place.fill(lambda data: DONE)
    assert waited == ["copy"]
