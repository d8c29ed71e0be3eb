"""Fixed workloads, timed against a plain loop over clients in the same process."""

from fedge.bench.plain import plain_round
from fedge.bench.timing import Timing, measure
from fedge.bench.workloads import WORKLOADS, Workload

__all__ = ["WORKLOADS", "Timing", "Workload", "measure", "plain_round"]
