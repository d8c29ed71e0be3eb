"""Reports: run folders in, one self-contained page and its figures out."""

from fedge.report.errors import MissingExtra, ReportError
from fedge.report.groups import grouped
from fedge.report.read import RunFolder, read, read_all
from fedge.report.series import curve, default_target, to_target
from fedge.report.tidy import results, tidy
from fedge.report.trackers import TensorBoard, Tracker, open_tracker
from fedge.report.write import devices_figure, headline, partition_figure, write_report

__all__ = [
    "MissingExtra",
    "ReportError",
    "RunFolder",
    "TensorBoard",
    "Tracker",
    "curve",
    "default_target",
    "devices_figure",
    "grouped",
    "headline",
    "open_tracker",
    "partition_figure",
    "read",
    "read_all",
    "results",
    "tidy",
    "to_target",
    "write_report",
]
