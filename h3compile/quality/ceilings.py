"""What this machine reaches: its ceilings, timed, as a target."""

from __future__ import annotations

import datetime
import gc
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch

from h3compile.errors import H3CompileError
from h3compile.ops.numerics import FP8
from h3compile.progress import Progress
from h3compile.quality import probes
from h3compile.quality.clock import Work, median_seconds
from h3compile.quality.probes import Compiling, Probe
from h3compile.targets import Link, Rate, Target, find_target, targets
from h3compile.targets.detect import current_device
from h3compile.targets.rates import LinkKind

__all__ = ["Sizes", "measure"]

# A PCIe Gen 5 x16 slot moves no more, and no NVLink that is in use moves less.
_PCIE = 64e9
_LAUNCHES = 200
# Of what is free, so that two buffers fit whatever else is on the device.
_SHARE_OF_FREE = 8
_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": FP8, "int8": torch.int8, "float32": torch.float32}
# What work ends in that a device, torch or Triton cannot do; out of memory is a RuntimeError.
_CANNOT = (RuntimeError, ImportError, H3CompileError)


@dataclass(frozen=True)
class Sizes:
    """How much work is timed: a model's shapes, cut down where a CPU does it.

    ``linears`` are weights as (N, K); ``rotated`` is how many channels of a head the rotary embedding turns.
    """

    linears: tuple[tuple[int, int], ...]
    rows: int
    heads: int
    attention_rows: int
    rotated: int
    copied: int = 4 * 2**30

    def for_cpu(self) -> Sizes:
        """A thousandth of it: what two cores do in a second or so."""
        return replace(
            self,
            rows=min(self.rows, 64),
            heads=min(self.heads, 8),
            attention_rows=min(self.attention_rows, 1024),
            copied=min(self.copied, 2**28),
        )


def measure(sizes: Sizes, progress: Progress, seconds: float = 1.0) -> Target:
    """Time the current CUDA device, or the CPU where there is none, and give its target.

    Every rate is the median of work on random data, back to back for about ``seconds``. A linear's rate is
    that of all ``linears`` together. What the device cannot do is left out, and ``progress`` is told why.
    A target under a known name keeps what needs a second device, where there is none. Raises
    `H3CompileError` for a device of an architecture that nothing is compiled for.
    """
    blank = _identity()
    cuda = blank.kind == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available
    sizes = sizes if cuda else sizes.for_cpu()
    sizes = replace(sizes, copied=min(sizes.copied, free // _SHARE_OF_FREE))
    known = targets().get(blank.name, blank)
    with tempfile.TemporaryDirectory(prefix="h3compile-", ignore_cleanup_errors=True) as folder:
        bench = _Bench(blank, device, sizes, progress, seconds, Path(folder))
        bandwidth = bench.bandwidth()
        host = bench.host(known) if cuda else None
        peer = (bench.peer(known) if torch.cuda.device_count() > 1 else known.peer) if cuda else None
        launch = bench.launch()
        flops = dict(bench.flops())
    return replace(blank, bandwidth=bandwidth, host=host, peer=peer, launch_seconds=launch, flops=flops)


def _identity() -> Target:
    """Name, architecture, memory and device name of what is measured, without rates."""
    device = current_device()
    if device is None:
        return replace(find_target("cpu"), title=f"{_cpu_name()}, {torch.get_num_threads()} threads")
    same = [target for target in targets().values() if target.names(device.name)]
    alike = [target for target in targets().values() if target.capability == device.capability]
    if not alike:
        major, minor = device.capability
        raise H3CompileError(
            f"{device.name} has the architecture sm_{major}{minor}, and nothing is compiled for it",
            "measure on another device",
        )
    name = same[0].name if same else "-".join(device.name.lower().split())
    return Target(name, device.name, (same or alike)[0].arch, device.memory, (device.name,))


def _cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


@dataclass
class _Bench:
    target: Target
    device: torch.device
    sizes: Sizes
    progress: Progress
    seconds: float
    folder: Path
    source: str = field(init=False)
    run: Compiling = field(init=False)

    def __post_init__(self) -> None:
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        self.source = f"measured on {self.target.title}, {today}, torch {torch.__version__}"
        self.run = Compiling(self.target.arch, self.device, self.folder)

    def bandwidth(self) -> Rate | None:
        with self._phase("copies"):
            probe = probes.copy(self.sizes.copied, self.device, self.device)
            return self._fastest("bandwidth", [replace(probe, amount=2 * probe.amount)])

    def host(self, known: Target) -> Link | None:
        with self._phase("copies from pinned memory"):
            free = psutil.virtual_memory().available // _SHARE_OF_FREE
            nbytes = min(self.sizes.copied, free, 2**30)
            rate = self._fastest("host", [probes.copy(nbytes, torch.device("cpu"), self.device)])
        if rate is None:
            return None
        shared = bool(getattr(torch.cuda.get_device_properties(self.device), "is_integrated", False))
        kind: LinkKind = known.host.kind if known.host is not None else "unified" if shared else "pcie"
        return Link(kind, rate)

    def peer(self, known: Target) -> Link | None:
        here = self.device.index
        other = torch.device("cuda", next(i for i in range(torch.cuda.device_count()) if i != here))

        def wait() -> None:
            torch.cuda.synchronize(self.device)
            torch.cuda.synchronize(other)

        with self._phase(f"copies to {other}"):
            rate = self._fastest("peer", [probes.copy(self.sizes.copied, self.device, other)], wait)
        if rate is None:
            return None
        kind: LinkKind = "nvlink" if rate.nominal > _PCIE else "pcie"
        return Link(known.peer.kind if known.peer is not None else kind, rate)

    def launch(self) -> float:
        one = torch.zeros(1, device=self.device)

        def work() -> None:
            for _ in range(_LAUNCHES):
                one.add_(1)

        with self._phase("launches"):
            return median_seconds(work, self.device, self.seconds) / _LAUNCHES

    def flops(self) -> Iterator[tuple[str, Rate]]:
        """A rate for every kind of work that can be done here."""
        for kind in self._kinds():
            key = f"gemm.{kind}"
            with self._phase(key):
                rate = self._together(
                    key, probes.linears(self.sizes.linears, self.sizes.rows, _DTYPES[kind], self.device)
                )
            if rate is not None:
                yield key, rate
        for key, made in self._attentions():
            with self._phase(key):
                rate = self._fastest(key, made)
            if rate is not None:
                yield key, rate

    def _kinds(self) -> tuple[str, ...]:
        capability = self.target.capability
        if capability is None:
            return ("bfloat16", "float32")
        # No tensor core before Ada multiplies E4M3.
        fp8 = ("float8_e4m3fn",) if capability >= (8, 9) else ()
        return ("bfloat16", *fp8, "int8", "float32")

    def _attentions(self) -> Iterator[tuple[str, Iterable[Probe]]]:
        rows, heads, arch = self.sizes.attention_rows, self.sizes.heads, self.target.arch
        yield "attention.bfloat16", probes.attention(rows, heads, arch, self.device, self.run)
        if self.device.type == "cuda":
            for kind in ("float8_e4m3fn", "int8"):
                made = list(probes.sage(kind, rows, heads, self.sizes.rotated, arch, self.device, self.run))
                if made:
                    yield f"attention.{kind}", made

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.progress.phase(name, None)
        yield
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fastest(self, key: str, made: Iterable[Probe], wait: Work | None = None) -> Rate | None:
        """The best rate of several ways to do one thing."""
        found = [(probe.amount / took, probe.how) for probe in made if (took := self._time(key, probe, wait))]
        if not found:
            return None
        rate, how = max(found)
        return Rate(rate, 1.0, f"{self.source}; {how}")

    def _together(self, key: str, made: Sequence[Probe]) -> Rate | None:
        """The rate of things that are done one after another."""
        took = 0.0
        for probe in made:
            one = self._time(key, probe, None)
            if one is None:
                return None
            took += one
        total = sum(probe.amount for probe in made)
        return Rate(total / took, 1.0, f"{self.source}; {len(made)} linears of {self.sizes.rows} rows")

    def _time(self, key: str, probe: Probe, wait: Work | None) -> float | None:
        """Seconds of ``probe``, or None, told, where it cannot be done."""
        try:
            took = median_seconds(probe.make(), self.device, self.seconds, wait)
        except _CANNOT as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            self.progress.note(f"{key} by {probe.how} is left out: {reason}")
            return None
        self.progress.advance()
        return took
