"""How long a step of a row-sharded solve takes: bytes and latency, on paper.

With k processes, each of which has 1/k of the entries of A, a step takes

    T(k) = R / k + C + M · S(N, k),    S(N, k) = 2 (k − 1) (λ + N / (k β)),

where R is the time for products with all rows in one process, C the time for what every process
does for itself with vectors of n numbers, M the number of sums over the processes in a step, N the
bytes of one, λ the latency of a message and β the bandwidth of a link: the sum goes around a ring,
twice (k − 1) messages of N/k bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MACHINES", "Fit", "Machine", "Network", "fitted", "on", "sum_seconds"]

ENTRY = 12  # bytes of an entry by columns: a number and the place of its row
NUMBER = 8


@dataclass(frozen=True)
class Network:
    """What a message costs."""

    latency: float  # λ, seconds
    bandwidth: float  # β, bytes a second


@dataclass(frozen=True)
class Machine:
    """One process's share of a machine, and the network between the processes."""

    name: str
    memory: float  # bytes a second that it reads
    network: Network
    processes: int


# Data sheets at half of their peak, as products with sparse matrices get about that
MACHINES = (
    Machine("8 GPUs with NVLink", 2.4e12, Network(5e-6, 200e9), 8),
    Machine("64 nodes with 100 Gbit/s", 100e9, Network(15e-6, 10e9), 64),
)


def sum_seconds(numbers: int, processes: int, network: Network, width: int = NUMBER) -> float:
    """S(N, k): the sum of vectors of so many numbers over the processes."""
    share = numbers * width / processes
    return 2 * (processes - 1) * (network.latency + share / network.bandwidth)


@dataclass(frozen=True)
class Fit:
    """R and C of a whole solve, and what it exchanges."""

    rows: float  # R, seconds in one process
    common: float  # C
    messages: Sequence[int]  # numbers of each sum

    def seconds(self, processes: int, network: Network) -> float:
        """T(k) of the solve."""
        exchanged = sum(sum_seconds(each, processes, network) for each in self.messages)
        return self.rows / processes + self.common + exchanged


def fitted(whole: float, computing: float, processes: int, messages: Sequence[int]) -> Fit:
    """From the seconds that one process takes, and those that each of several computes."""
    rows = max((whole - computing) * processes / (processes - 1), 0.0)
    return Fit(rows, max(whole - rows, 0.0), messages)


def on(machine: Machine, entries: int, columns: int, passes: float, processes: int) -> float:
    """Seconds of one step elsewhere, from the bytes that it reads.

    A step reads the entries of A once and n-vectors ``passes`` times, and sums one n-vector.
    """
    rows, common = ENTRY * entries / processes, passes * NUMBER * columns
    exchanged = sum_seconds(columns, processes, machine.network)
    return (rows + common) / machine.memory + exchanged
