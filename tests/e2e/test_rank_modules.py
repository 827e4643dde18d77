"""An engine built for several ranks, loaded in processes that `torch.distributed` has joined already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import h3compile
from h3compile.errors import EngineError, H3CompileError, RankFailure
from h3compile.runtime.module import CompiledTransformer

Inputs = dict[str, torch.Tensor]
OnRanks = Callable[..., list[object]]

# Of float32 velocities of about 1: sums in another order, through four blocks; measured 3e-7.
FP32_BOUND = 2e-6

PARTITIONS = {"t2va": "transformer", "fl2va": "transformer", "ref2va": "transformer_ref"}


def outputs(module: CompiledTransformer, forwards: list[Inputs]) -> list[tuple[torch.Tensor, ...]]:
    return [module(**inputs, return_dict=False) for inputs in forwards]


@pytest.mark.matrix
@pytest.mark.parametrize("task", PARTITIONS)
def test_ranks_give_what_one_gives(
    engines: Callable[..., Path],
    modules: Callable[..., CompiledTransformer],
    requests_of: Callable[..., Iterator[Inputs]],
    on_ranks: OnRanks,
    task: str,
) -> None:
    path = engines(torch.float32, "ranks4")
    forwards = list(requests_of(task, torch.float32))
    expected = outputs(modules(torch.float32, "one", PARTITIONS[task]), forwards)

    def work(rank: int) -> object:
        module = h3compile.load(path, partition=PARTITIONS[task])
        assert module.ranks is not None and module.ranks.rank == rank
        return outputs(module, forwards), module.stats.bytes_sent

    results = on_ranks(4, work)
    for found, sent in results:  # type: ignore[misc]
        for one, other in zip(expected, found, strict=True):
            for a, b in zip(one, other, strict=True):
                assert (a - b).abs().max() <= FP32_BOUND
        assert sent == results[0][1] > 0  # type: ignore[index]


def test_one_rank_leads_and_the_others_follow(
    engines: Callable[..., Path], packed: Callable[..., Inputs], on_ranks: OnRanks
) -> None:
    path = engines(torch.float32, "ranks4")
    first = packed("t2va", text=7, video=37, audio=14, timesteps=1, dtype=torch.float32)
    later = first | {
        "timestep": torch.tensor([0.25]),
        "hidden_states": packed("t2va", text=7, video=37, audio=14, dtype=torch.float32, seed=1)[
            "hidden_states"
        ],
    }

    def work(rank: int) -> object:
        module = h3compile.load(path)
        if rank:
            return module.follow(), module.stats.request_misses
        with module.leading():
            alone = outputs(module, [first, later])
            with pytest.raises(H3CompileError, match="token_tags holds"):
                module(**first | {"token_tags": first["token_tags"] + 3})
            module.stop()
            with pytest.raises(h3compile.errors.Interrupted):
                module(**later)
            again = outputs(module, [later])
        assert all(torch.equal(a, b) for a, b in zip(alone[1], again[0], strict=True))
        return module.stats.forwards

    assert on_ranks(4, work) == [3, (3, 1), (3, 1), (3, 1)]


def test_inputs_that_differ_are_refused_by_all_and_the_next_forward_runs(
    engines: Callable[..., Path], packed: Callable[..., Inputs], on_ranks: OnRanks
) -> None:
    path = engines(torch.float32, "ranks4")
    inputs = packed("t2va", text=7, video=37, audio=14, dtype=torch.float32)

    def work(rank: int) -> object:
        module = h3compile.load(path)
        own_noise = inputs | {"hidden_states": inputs["hidden_states"] + (rank == 2)}
        lines = []
        for given in (own_noise, inputs | {"token_tags": inputs["token_tags"] + 9 * (rank == 1)}):
            with pytest.raises(H3CompileError) as raised:
                module(**given)
            lines.append(str(raised.value))
        return lines, torch.stack([part.abs().sum() for part in outputs(module, [inputs])[0]])

    results = on_ranks(4, work)
    for rank, ((noise, tags), sums) in enumerate(results):  # type: ignore[misc]
        assert noise.startswith("ranks 0 and 2 were given different hidden_states"), noise
        assert tags.startswith(
            "token_tags holds" if rank == 1 else "rank 1 refuses its inputs: token_tags holds"
        )
        assert torch.equal(sums, results[0][1])  # type: ignore[index]


def test_after_an_error_in_the_midst_of_a_forward_none_runs(
    engines: Callable[..., Path], packed: Callable[..., Inputs], on_ranks: OnRanks
) -> None:
    path = engines(torch.float32, "ranks4")
    inputs = packed("t2va", text=7, video=37, audio=14, dtype=torch.float32)

    def fails(arguments: object) -> NoReturn:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def work(rank: int) -> object:
        module = h3compile.load(path)
        module(**inputs)
        module._parts.runner._calls[2].executor._run = fails
        lines = []
        for _ in range(2):
            with pytest.raises(H3CompileError) as raised:
                module(**inputs)
            lines.append((type(raised.value).__name__, raised.value.cause))
        return lines

    found = on_ranks(4, work)
    # Whose error came first is told by all; it keeps its own, with the figures.
    first = [lines[0] for lines in found if lines[0][0] == "H3CompileError"]  # type: ignore[index]
    assert len(first) == 1 and first[0][1].startswith("cpu ran out of memory in a forward of 58 rows")
    (again,) = {lines[1] for lines in found}  # type: ignore[index]
    assert again[0] == RankFailure.__name__
    assert "failed with OutOfMemoryError: CUDA out of memory" in again[1]


def test_one_process_is_told_how_to_start_them(engines: Callable[..., Path]) -> None:
    with pytest.raises(EngineError, match="was built for 4 ranks, and this process runs alone"):
        h3compile.load(engines(torch.float32, "ranks4"))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["gathered", "gathered in pieces"])
def test_blocks_gathered_from_shards_of_all_ranks_give_the_same_bits(
    engines: Callable[..., Path],
    requests_of: Callable[..., Iterator[Inputs]],
    on_ranks: OnRanks,
    kind: str,
) -> None:
    whole, gathered = engines(torch.float32, "ranks4"), engines(torch.float32, kind)
    forwards = list(requests_of("t2va", torch.float32))[:3]

    def work(rank: int) -> object:
        module, other = h3compile.load(whole), h3compile.load(gathered)
        assert other.residency is not None and other.residency.mode == "allgather"
        for one, two in zip(outputs(module, forwards), outputs(other, forwards), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        local = h3compile.load(whole, resident=1)
        outputs(local, forwards[:1])
        held = [found._parts.streamer.reader.nbytes for found in (other, local)]  # type: ignore[union-attr]
        return other.residency.resident, held, other.stats.bytes_sent == module.stats.bytes_sent

    for resident, (shards, ranges), same_exchanges in on_ranks(4, work):  # type: ignore[misc]
        assert resident == ("block.0",)
        assert same_exchanges, "weights have a group of their own"
        assert ranges / 4 <= shards < ranges / 4 * 1.05, (shards, ranges)
