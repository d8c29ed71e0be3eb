"""The figures of a GPU that change with the code, in one command of two and a half minutes, most important first.

    python -m benchmarks.speed.gpu --out DIR [--device cuda] [--seconds 150] [NAME ...]

Every line of PLAN is measured by itself and written to DIR/NAME.json at once, in the form of `fedge bench --json`. One
that would probably not end in the seconds that are left is passed over and named; DIR/NAME.failed.txt keeps why one
failed, and what was warned of (a step that cannot be recorded is slow and no failure) stands in the file, too.
`--device cpu --short` rehearses it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedge.bench import WORKLOADS, Timing, measure
from fedge.bench.split import around
from fedge.cli.bench import figures
from fedge.runs.folder import versions
from fedge.sweep.hardware import hardware


class Line(NamedTuple):
    """One measurement; `seconds` is about what it takes on an H200, compilation included."""

    name: str
    workload: str
    seconds: float
    plain: bool = False  # the loop over clients in turns
    compile: bool = False
    precision: str = "tf32"
    repeats: int = 5


PLAN = (
    Line("D_tf32_compiled", "D", 30, compile=True, repeats=9),
    Line("R_tf32", "R", 15, plain=True, repeats=3),
    Line("L_tf32", "L", 12, plain=True, repeats=3),
    Line("T_tf32", "T", 12, plain=True, repeats=3),
    Line("U_tf32", "U", 12, plain=True, repeats=3),
    Line("A_tf32_compiled", "A", 25, compile=True),
    Line("E_tf32_compiled", "E", 40, compile=True, repeats=3),
    Line("D_tf32", "D", 6, repeats=9),
    Line("D_fp32", "D", 6, precision="fp32"),
)


def one(line: Line, device: str, short: bool) -> Timing:
    """The engine's sections are part of every measurement."""
    gpu = device != "cpu"
    options: dict[str, Any] = {"precision": line.precision, "compile": line.compile} if gpu else {"way": "stacked"}
    repeats = 1 if short else line.repeats
    plain = line.plain and not short
    return measure(WORKLOADS[line.workload], device, repeats, plain, details=False, profile=True, **options)


def said(line: Line, timing: Timing) -> str:
    ratio = "" if timing.ratio is None else f", {timing.ratio:.1f} times the {timing.peer}"
    share = f", {around(timing.split):.0%} around the clients' work"
    return f"{line.name}: {1e3 * timing.median:.3f} ms per round{ratio}{share}, first round {timing.first:.1f} s"


def texts(heard: list[warnings.WarningMessage]) -> list[str]:
    return [f"{one.category.__name__}: {one.message}" for one in heard]


def run(out: Path, device: str, seconds: float, lines: tuple[Line, ...], short: bool) -> None:
    begin = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    about = {"versions": versions(), "hardware": hardware(device), "torch": torch.__version__}
    for line in lines:
        left = seconds - (time.perf_counter() - begin)
        if line.seconds > left:
            print(f"{line.name}: passed over, {left:.0f} s left and about {line.seconds:.0f} needed", flush=True)
            continue
        failed = out / f"{line.name}.failed.txt"
        failed.unlink(missing_ok=True)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("default")
            try:
                timing = one(line, device, short)
            except Exception as error:  # the others are still wanted
                failed.write_text(traceback.format_exc() + "".join(f"warned: {text}\n" for text in texts(heard)))
                print(f"{failed.read_text()}{line.name}: FAILED, {type(error).__name__}: {error}", flush=True)
                continue
        settings = {"precision": line.precision, "compile": line.compile, "warnings": texts(heard)}
        (out / f"{line.name}.json").write_text(
            json.dumps({**about, **settings, "timings": [figures(timing)]}, indent=1)
        )
        print(said(line, timing), *(f"    warned: {text}" for text in texts(heard)), sep="\n", flush=True)
        for share in timing.split:
            print(f"    {share.section:24} host {share.host:8.3f}  GPU {share.gpu or 0:8.3f}", flush=True)
        if device != "cpu":
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s in all", flush=True)


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(line.name for line in PLAN))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--short", action="store_true", help="one repeat, no loop")
    chosen = parser.parse_args(args)
    lines = tuple(line for line in PLAN if not chosen.names or line.name in chosen.names)
    run(chosen.out, chosen.device, chosen.seconds, lines, chosen.short)


if __name__ == "__main__":
    main(sys.argv[1:])
