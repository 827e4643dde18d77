"""What a compiled artifact needs of the machine it runs on, as data that can be recorded and compared."""

from __future__ import annotations

import platform
import re
import sysconfig
from pathlib import Path

import torch

__all__ = ["cpu_features", "device_arch", "kernel_arch", "python_abi", "torch_release"]

# The instruction sets a C++ compiler may use under -march=native; other flags of the kernel's list
# (hypervisor, cache control, mitigations) do not change generated code.
_INSTRUCTION_SET = re.compile(
    r"(sse|ssse|avx|fma|f16c|bmi|amx|vaes|vpclmul|gfni|movbe|popcnt|abm|adx|sha|aes|pclmul|asimd|sve|bf16|i8mm|fphp|dotprod)"
)


def cpu_features(listing: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets of this CPU, as Linux spells them; empty where there is no listing."""
    if not listing.exists():
        return frozenset()
    for line in listing.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(flag for flag in value.split() if _INSTRUCTION_SET.match(flag))
    return frozenset()


def device_arch(device: torch.device) -> str:
    """``sm_90`` for a CUDA device, the machine name (``x86_64``) for the CPU."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return platform.machine()


def kernel_arch(device: torch.device) -> str:
    """What our kernels are compiled for on a CUDA device, such as ``sm_90a``: with its own instructions."""
    arch = device_arch(device)
    return f"{arch}a" if torch.cuda.get_device_capability(device) >= (9, 0) else arch


def python_abi() -> str:
    """The tag extension modules of this interpreter carry, such as ``cpython-311-x86_64-linux-gnu``."""
    return str(sysconfig.get_config_var("SOABI"))


def torch_release(device: torch.device) -> str:
    """The torch version an artifact is bound to; for CUDA with the toolkit it was built for."""
    version = str(torch.__version__)
    return version if device.type == "cuda" else version.partition("+")[0]
