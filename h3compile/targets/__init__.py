"""The devices an engine can be built for, and which of them this machine is."""

from __future__ import annotations

from h3compile.targets.detect import detect, present, resolve_target
from h3compile.targets.target import Target, find_target, targets

__all__ = ["Target", "detect", "find_target", "present", "resolve_target", "targets"]
