"""What a loaded engine has done and what it holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass
class Stats:
    """Counters since the engine was loaded, and the bytes it holds now.

    A request hit is a forward whose request-stage values were all kept from the forward before. Table hits
    and misses count distinct timesteps a forward: a miss was evaluated from the cold weights.
    """

    forwards: int = 0
    request_hits: int = 0
    request_misses: int = 0
    table_hits: int = 0
    table_misses: int = 0
    bytes_weights: int = 0  # shared ranges are counted by every module that uses them
    bytes_slots: int = 0  # that streamed weights take turns in
    bytes_tables: int = 0
    bytes_activations: int = 0  # of the last step, placed before it ran; held while one runs
    bytes_request: int = 0
    bytes_host: int = 0  # streamed weights and their tables, in host memory, shared ones as above
    bytes_sent: int = 0  # to other ranks since loading, by the exchanges of forwards
    bytes_copied: int = 0  # weights brought to the device since loading by a plan that streams

    @property
    def bytes_resident(self) -> int:
        """Everything the module keeps on its device between forwards, in bytes."""
        return self.bytes_weights + self.bytes_slots + self.bytes_tables + self.bytes_request
