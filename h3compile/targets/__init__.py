"""The devices an engine can be built for, and which of them this machine is."""

from __future__ import annotations

from h3compile.targets.detect import detect, present, resolve_target
from h3compile.targets.file import read_target, write_target
from h3compile.targets.known import find_target, recorded_target, targets
from h3compile.targets.node import Node, find_node
from h3compile.targets.rates import FLOPS, Link, Rate
from h3compile.targets.target import Target

__all__ = [
    "FLOPS",
    "Link",
    "Node",
    "Rate",
    "Target",
    "detect",
    "find_node",
    "find_target",
    "present",
    "read_target",
    "recorded_target",
    "resolve_target",
    "targets",
    "write_target",
]
