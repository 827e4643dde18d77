"""Plans: what they promise is what the simulation, the memory model and the race checker say."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from h3compile.errors import H3CompileError
from h3compile.plan.cost import Parallel
from h3compile.plan.planner import PLACEMENTS, Objective, Placements, Planner, Question
from h3compile.plan.plans import Plan
from h3compile.plan.search import EQUAL, TOLERANCE, fastest
from h3compile.plan.shapes import Clip
from h3compile.plan.shortage import shortage, too_slow
from h3compile.plan.space import Space
from h3compile.plan.work import ProgramWork, released
from h3compile.targets import Node, find_node, find_target

GIB = 2**30
# A small canvas on a fast card: what is computed in a block does not hide its copy.
SMALL = Clip(480, 256)


def question(node: str = "h200", clip: Clip = SMALL, **options: object) -> Question:
    options = {"components": "elsewhere", **options}
    return Question(find_node(node), clip, **options)  # type: ignore[arg-type]


def few_blocks(passes: str) -> ProgramWork:
    return released(passes).with_blocks(6)


def space(shards: int = 1, group: int | None = None, target: str = "b300") -> Space:
    return Space(few_blocks(""), find_target(target), SMALL, parallel=Parallel(shards, group))


@pytest.mark.parametrize(("shards", "group"), [(1, None), (1, 8), (2, 8), (8, None)])
def test_no_schedule_beats_the_bound(shards: int, group: int | None) -> None:
    for candidate in space(shards, group).candidates():
        assert candidate.step >= candidate.bound * (1 - 1e-9), candidate.residency


@pytest.mark.parametrize(("shards", "group"), [(1, None), (2, 8), (8, None)])
def test_memory_on_the_line_is_memory_by_itself(shards: int, group: int | None) -> None:
    here = space(shards, group)
    for candidate in here.candidates():
        memory = here.memory(candidate.residency)
        assert (memory.peak, memory.host * here.devices) == (candidate.device, candidate.host)


@pytest.mark.parametrize("node", ["h200", "2xh200"])
def test_every_plan_is_free_of_races(node: str) -> None:
    planner = Planner(question(node, work=few_blocks))
    for plans in planner.frontiers().values():
        assert plans
        for plan in plans:
            assert plan.races() == []


def test_the_fastest_is_that_of_simulating_all() -> None:
    limit = 6 * GIB
    planner = Planner(question("2xh200", hbm=limit, work=few_blocks))
    found = planner.fastest()
    steps = []
    for shards in (1, 2):
        here = space(shards, target="h200")
        steps += [here.step(one.residency) for one in here.candidates() if one.device <= limit]
    assert found is not None and found.step <= min(steps) * (1 + EQUAL)


def test_the_smallest_is_as_fast_as_asked_and_no_plan_is_smaller() -> None:
    planner = Planner(question())
    for slowdown in (0.0, 0.05, 0.5):
        found = planner.smallest(slowdown)
        assert found is not None and found.slowdown <= slowdown + 1e-6
        for plan in planner.frontiers()[""]:
            assert plan.device_bytes >= found.device_bytes or plan.slowdown > slowdown


def test_a_frontier_trades_time_for_memory() -> None:
    plans = Planner(question()).frontiers()[""]
    assert len(plans) > 5
    for less, more in itertools.pairwise(plans):
        assert less.device_bytes < more.device_bytes
        assert less.step > more.step * (1 + TOLERANCE) * (1 - 1e-9)
    # The last is as fast as all resident, and smaller: copies hide behind the rest.
    assert plans[-1].slowdown < 2 * TOLERANCE


def test_a_large_canvas_needs_no_resident_block() -> None:
    plan = Planner(question("rtx-4090", Clip())).smallest(0.0)
    assert plan is not None and not plan.residency.resident and plan.residency.slots == 2
    assert plan.bounds["compute"] > 0.99


@pytest.mark.parametrize("objective", get_args(Objective))
@pytest.mark.parametrize("count", [1, 2, 3, 6, 8])
def test_weights_are_gathered_by_the_ranks_of_one_clip(count: int, objective: Objective) -> None:
    """Every candidate, so whatever is asked for: an engine's ranks gather from no others."""
    planner = Planner(Question(Node(find_target("b300"), count), SMALL, objective=objective, work=few_blocks))
    pool = planner._pool(PLACEMENTS[0])
    gathered = {here for one, here in pool.items() if one.residency.mode == "allgather"}
    assert all(here.parallel.ranks == here.parallel.shards > 1 for here in gathered)
    assert bool(gathered) == any(here.parallel.shards > 1 for here in pool.values())


def test_what_fits_whole_is_not_streamed() -> None:
    plan = Planner(question("h200", Clip())).fastest()
    assert plan is not None and not plan.residency.streamed


def test_a_budget_holds() -> None:
    sizes = []
    for budget in (6, 10, 20, 40):
        plan = Planner(question(hbm=budget * GIB)).fastest()
        assert plan is not None and plan.device_bytes <= budget * GIB == plan.limit
        sizes.append(plan.step)
    assert sizes == sorted(sizes, reverse=True)


def test_a_budget_of_the_host_keeps_more_on_the_device() -> None:
    free, bounded = Planner(question("h200", Clip())), Planner(question("h200", Clip(), host=20 * GIB))
    one, other = free.smallest(0.02), bounded.smallest(0.02)
    assert one is not None and other is not None
    assert other.host_bytes <= 20 * GIB < one.host_bytes
    assert len(other.residency.resident) > len(one.residency.resident)


def test_allowed_passes_are_taken_where_they_help() -> None:
    planner = Planner(question(allow=("fp8",)))
    assert list(planner.variants) == ["", "fp8"]
    assert set(planner.frontiers()) == {"", "fp8"}
    found = planner.fastest()
    assert found is not None and found.space.passes == "fp8"


def test_what_the_target_cannot_compute_is_left_out_or_refused() -> None:
    planner = Planner(question("a100", allow=("fp8",)))
    assert list(planner.variants) == [""]
    assert planner.notes == ["fp8 is left out: a100 has no rate for gemm.float8_e4m3fn"]
    with pytest.raises(H3CompileError, match=r"a100 has no rate for gemm\.float8_e4m3fn"):
        Planner(question("a100", passes="fp8"))


def test_more_devices_take_less_of_each_and_less_time() -> None:
    plans = [Planner(question(node, Clip())).smallest(0.02) for node in ("b300", "2xb300", "8xb300")]
    one, two, eight = plans
    assert one is not None and two is not None and eight is not None
    assert one.step > 1.8 * two.step > 6 * eight.step
    assert eight.space.parallel.shards == 8


def test_throughput_makes_a_clip_on_each_device() -> None:
    found = Planner(question("2xrtx-5090", Clip(), objective="throughput")).fastest()
    alone = Planner(question("rtx-5090", Clip())).fastest()
    assert found is not None and alone is not None
    assert (found.space.parallel.shards, found.space.replicas) == (1, 2)
    assert found.step == pytest.approx(alone.step)
    assert found.clips_an_hour == pytest.approx(2 * alone.clips_an_hour)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("h200", ("moved", "moved")),
        ("rtx-4090", ("streamed", "moved")),
    ],
)
def test_components_live_where_they_fit(node: str, expected: Placements) -> None:
    planner = Planner(question(node, Clip(), components=None))
    found = planner.fastest()
    assert planner.placements == expected
    assert found is not None and found.device_bytes <= (found.limit or 0)


def test_one_memory_for_both_is_not_streamed_within() -> None:
    planner = Planner(question("gb10", Clip(), components=None))
    (plan,) = planner.frontiers()[""]
    assert not plan.residency.streamed
    found = planner.smallest(0.1)
    assert found is not None and found.device_bytes + found.host_bytes <= (found.limit or 0)
    assert Planner(question("gb10", Clip(), hbm=44 * GIB, components=None)).fastest() is None


def test_request_and_step_agree() -> None:
    plan = Planner(question()).fastest()
    assert plan is not None
    assert plan.request.steps == pytest.approx(49 * plan.step)
    assert plan.request.total > plan.request.steps
    begin, end = plan.window
    assert end - begin == pytest.approx(plan.step, rel=1e-6)
    assert sum(plan.bounds.values()) == pytest.approx(1.0)


def test_copies_are_what_the_link_must_carry() -> None:
    planner = Planner(question("8xb300", Clip()))
    plans: list[Plan] = planner.frontiers()[""]
    gathered = next(plan for plan in plans if plan.residency.mode == "allgather")
    whole = sum(released().weights[name] for name in gathered.residency.streamed)
    assert gathered.copied_bytes == pytest.approx(whole / 8, rel=2e-3)


def test_the_record_is_plain_and_adds_up() -> None:
    plan = Planner(question(components="moved")).fastest()
    assert plan is not None
    record = plan.record()
    device = record["device_bytes"]
    assert isinstance(device, dict)
    assert max(sum(kinds.values()) for kinds in device.values()) == record["device_bytes_peak"]
    assert record["components"] == {"text-encoder": "moved", "video-vae": "moved", "audio-vae": "moved"}
    clip = record["clip"]
    assert isinstance(clip, dict) and clip["rows"] == SMALL.dims["rows"]


def test_a_budget_below_everything_says_by_how_much_and_what_would_fit() -> None:
    planner = Planner(question("rtx-4090", Clip(frames=345), hbm=6 * GIB))
    assert planner.fastest() is None and not planner.fits()
    line = str(shortage(planner))
    assert line.startswith("no plan fits 6.0 GiB of a rtx-4090: the smallest takes ")
    assert "GiB more" in line and "--frames 124 (" in line


def test_a_host_that_is_too_small_says_so() -> None:
    line = str(shortage(Planner(question("rtx-4090", Clip(), host=16 * GIB))))
    assert line.startswith("no plan fits 16.0 GiB of the host: the smallest takes ")
    assert "--allow fp8" in line


def test_components_make_room_for_short_steps() -> None:
    """The VAEs whole on the device leave room for one slot; through it by layers for two, and residents."""
    asked = question("h200", Clip(480, 256), hbm=17 * GIB, components=None)
    planner = Planner(asked)
    steps = {}
    for tried in PLACEMENTS[:3]:
        found = fastest(planner._fitting(tried))
        if found is not None:
            steps[tried] = found.step
    assert steps["streamed", "moved"] > 1.5 * steps["streamed", "streamed"]
    plan = planner.fastest()
    assert plan is not None and plan.step == steps["streamed", "streamed"]
    # Elsewhere there is always more room, and no device that the plan knows of.
    assert planner.placements == ("streamed", "streamed")


def test_components_that_do_not_fit_may_live_elsewhere() -> None:
    planner = Planner(question("rtx-4090", Clip(), components="moved"))
    assert planner.fastest() is None
    assert "--components elsewhere" in str(shortage(planner))


def test_where_nothing_helps_the_nearest_is_named() -> None:
    line = str(shortage(Planner(question("rtx-4090", Clip(), hbm=GIB))))
    assert "raise --hbm; nearest comes " in line


def test_a_plan_that_fits_and_is_too_slow_says_how_slow() -> None:
    planner = Planner(question(hbm=6 * GIB))
    assert planner.smallest(0.0) is None
    assert "no plan that fits is within 0%" in str(too_slow(planner, 0.0))


def test_heads_are_not_cut() -> None:
    """Three devices pass keys of one clip round, which SAGE cannot; or they make three clips."""
    node = Node(find_target("b300"), 3)
    plan = Planner(Question(node)).fastest()
    assert plan is not None and plan.space.parallel.shards == 3
    with pytest.raises(H3CompileError, match="3 GPUs for 56 heads are a ring of 3"):
        Planner(Question(node, passes="sage"))
    allowed = Planner(Question(node, allow=("fp8", "sage")))
    assert list(allowed.variants) == ["", "fp8"]
    assert [text.partition(":")[0] for text in allowed.notes] == [
        "sage is left out",
        "fp8,sage is left out",
    ]
    assert Planner(Question(node, objective="throughput", components="elsewhere")).fastest() is not None


def test_only_lossy_passes_are_allowed() -> None:
    with pytest.raises(H3CompileError, match="'fuse' cannot be allowed: choose among fp8, sage"):
        Question(find_node("h200"), allow=("fuse",))
