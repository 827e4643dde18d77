"""Replicas of a sequence-parallel group under Ray: two groups of two ranks share a list of prompts.

python examples/ray_replicas.py FOLDER [--model CHECKPOINT]      (pip install 'h3compile[ray]')

Ray places the processes, on one machine or many, and hands out the requests; ranks of a replica stay together
on one machine, where their links are. Nothing of h3compile knows of Ray.

Where RAY_ADDRESS is set it joins that cluster, else it starts Ray here. Every rank reads the engine, and rank
0 of each replica reads CHECKPOINT and writes clips: for several machines FOLDER and CHECKPOINT have to be on
storage that all of them see, at the same path.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import Any

import h3compile
from h3compile.models.tiny import write_tiny

REPLICAS, RANKS = 2, 2


class Rank:
    """A process of a replica, with a GPU of its own where there are GPUs."""

    def __init__(self, rank: int, engine: str, model: str) -> None:
        self.rank, self.engine, self.model = rank, engine, model

    def address(self) -> tuple[str, int]:
        """Where the ranks of this one's replica can meet."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def load(self, address: str, port: int) -> None:
        """Meets the others and loads the engine with them."""
        import torch
        import torch.distributed as dist

        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=self.rank, world_size=RANKS)
        # Ray shows a process no GPU but its own, which is therefore number 0.
        self.module = h3compile.load(self.engine, device="cuda:0" if torch.cuda.is_available() else "cpu")
        if self.rank == 0:
            from h3compile.models.generate import load_pipeline

            self.pipe = load_pipeline(Path(self.model), transformer=self.module, device=self.module.device)

    def follow(self) -> int:
        """Computes what rank 0 computes, until it has nothing more to do."""
        return self.module.follow()

    def generate(self, prompts: dict[str, str]) -> list[str]:
        """Makes a clip of every prompt, by the file it goes to. For rank 0, while the others follow."""
        from h3compile.models.generate import generate
        from h3compile.models.mp4 import write_mp4
        from h3compile.models.request import Request

        with self.module.leading():
            for path, prompt in prompts.items():
                write_mp4(Path(path), generate(self.pipe, Request(prompt, width=64, height=64, steps=3)))
        return list(prompts)


def replica(number: int, engine: Path, model: Path) -> list[Any]:
    """The ranks of one replica, on one machine."""
    import ray
    import torch
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    need = {"GPU": 1, "CPU": 1} if torch.cuda.is_available() else {"CPU": 1}
    together = placement_group([need] * RANKS, strategy="STRICT_PACK", name=f"replica-{number}")
    if not together.wait(60):
        raise SystemExit(f"no machine has {need} free for each of {RANKS} ranks, of replica {number}")
    options = {
        "num_cpus": need["CPU"],
        "num_gpus": need.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(together),
    }
    made = ray.remote(Rank).options(**options)
    ranks = [made.remote(rank, str(engine), str(model)) for rank in range(RANKS)]
    address, port = ray.get(ranks[0].address.remote())
    ray.get([rank.load.remote(address, port) for rank in ranks])
    return ranks


def prepare(options: argparse.Namespace) -> None:
    """Makes what is not there: the tiny model, where no other is named, and the engine."""
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.model is None:
        options.model = options.folder / "tiny"
        if not options.model.exists():
            write_tiny(options.model)
    engine = options.folder / "ranks.h3e"
    if not engine.exists():
        passes = f"sp(ranks={RANKS})"
        h3compile.build(str(options.model), output=engine, passes=passes, backend="eager", steps=(3,))


def main(options: argparse.Namespace) -> None:
    """Starts the replicas, and shares the prompts among them."""
    try:
        import ray
    except ImportError:
        raise SystemExit("Ray is not installed: pip install 'h3compile[ray]'") from None
    prepare(options)
    folder, model = options.folder.resolve(), options.model.resolve()
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)  # a cluster has counted what it has
    else:
        ray.init("local", num_cpus=REPLICAS * RANKS, include_dashboard=False, log_to_driver=False)
    replicas = [replica(number, folder / "ranks.h3e", model) for number in range(REPLICAS)]
    work = [{str(folder / f"clip-{number}.mp4"): f"wave number {number}"} for number in range(REPLICAS)]
    followers = [rank.follow.remote() for ranks in replicas for rank in ranks[1:]]
    done = [ranks[0].generate.remote(prompts) for ranks, prompts in zip(replicas, work, strict=True)]
    for paths in ray.get(done):  # a rank that fails raises here, with its reason
        print(f"{len(paths)} clip of a replica of {RANKS} ranks: {Path(paths[0]).name}")
    print(f"followers computed {sum(ray.get(followers))} forwards")
    ray.shutdown()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where engine and clips go; an engine there is kept")
    parser.add_argument("--model", type=Path, help="a checkpoint; the tiny one by default")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
