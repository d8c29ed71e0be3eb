"""Reports: run folders in, one self-contained page and its figures out."""

from fedge.report.errors import MissingExtra, ReportError
from fedge.report.read import RunFolder, read, read_all
from fedge.report.series import curve, default_target, to_target
from fedge.report.tensorboard import TensorBoard
from fedge.report.write import devices_figure, headline, partition_figure, write_report

__all__ = [
    "MissingExtra",
    "ReportError",
    "RunFolder",
    "TensorBoard",
    "curve",
    "default_target",
    "devices_figure",
    "headline",
    "partition_figure",
    "read",
    "read_all",
    "to_target",
    "write_report",
]
