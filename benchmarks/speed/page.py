"""Tables of the stored figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.readme import README, with_part
from fedge.bench import WORKLOADS

HERE = Path(__file__).parent

GPU = {  # file -> column
    "h200_fp32.json": "fp32",
    "h200_fp32_compiled.json": "fp32, compiled",
    "h200_tf32.json": "TF32",
    "h200_tf32_compiled.json": "TF32, compiled",
    "h200_bf16_compiled.json": "bf16, compiled",
}
CPU = ("cpu.json", "cpu_more.json")


def read(name: str) -> dict[str, Any]:
    """The timings of one file by workload, and what they were measured on; empty if there is no such file."""
    path = HERE / name
    if not path.is_file():
        return {"about": None, "timings": {}}
    content = json.loads(path.read_text("utf-8"))
    about = f"{content['hardware']}, torch {content['versions']['torch']}, Python {content['versions']['python']}"
    return {"about": about, "timings": {one["workload"]: one for one in content["timings"]}}


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if value < 0.02 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gpu_table() -> str:
    files = {column: read(name) for name, column in GPU.items()}
    columns = [column for column, content in files.items() if content["timings"]]
    rows = []
    for name, workload in WORKLOADS.items():
        found = [files[column]["timings"].get(name) for column in columns]
        if not any(found):
            continue
        plain = next((statistics.median(one["plain"]) for one in found if one and one["plain"]), None)
        rates = [one["flops_a_second"] for one in found if one and one["flops_a_second"]]
        best = min(one["median"] for one in found if one)
        rows.append([
            f"{name}: {workload.title}",
            *(seconds(one and one["median"]) for one in found),
            seconds(plain),
            "–" if plain is None else f"{plain / best:.0f}",
            f"{max(rates) / 1e12:.1f}" if rates else "–",
        ])  # fmt: skip
    return markdown(["workload", *columns, "plain loop", "times faster", "TFLOP/s"], rows)


def detail_table(name: str) -> str:
    rows = []
    for one in read(name)["timings"].values():
        rows.append([
            one["workload"],
            seconds(one["median"]),
            f"{min(one['seconds']):.4g} – {max(one['seconds']):.4g}",
            seconds(statistics.median(one["plain"]) if one["plain"] else None),
            "–" if one["ratio"] is None else f"{one['ratio']:.1f}",
            "–" if one["flops_a_second"] is None else f"{one['flops_a_second'] / 1e9:.0f}",
            f"{one['outside']:.0%}",
            "–" if one.get("around") is None else f"{one['around']:.0%}",
            f"{one['first']:.1f}",
            f"{one['peak_memory'] / 1e9:.1f}",
        ])  # fmt: skip
    header = [
        "",
        "s per round",
        "fastest – slowest",
        "plain loop",
        "times faster",
        "GFLOP/s",
        "outside kernels",
        "around the work",
    ]
    return markdown([*header, "first round, s", "peak so far, GB"], rows)


def summary() -> str:
    """The project's first table: a round here and in a plain loop, in the same process."""
    rows = []
    for place, files in (("H200", tuple(GPU)), ("2 CPU cores", CPU)):
        for name in ("A", "B", "C", "D") if place == "H200" else ("A", "B", "C"):
            timed = [(one, GPU.get(file)) for file in files if (one := read(file)["timings"].get(name))]
            plain = next((statistics.median(one["plain"]) for one, _ in timed if one["plain"]), None)
            if plain is None:
                continue
            best, how = min(timed, key=lambda pair: pair[0]["median"])
            ratio = (
                f"**{plain / best['median']:.0f}**"
                if plain / best["median"] >= 10
                else f"**{plain / best['median']:.1f}**"
            )
            epochs = ", E 5" if name == "A" and place == "H200" else ", E 1" if name == "A" else ""
            where = place if how is None else f"{place}, {how}"
            rows.append([WORKLOADS[name].title + epochs, where, seconds(plain), seconds(best["median"]), ratio])
    return markdown(["one round of FedAvg", "on", "plain loop, s", "fedge, s", "times faster"], rows)


def page() -> str:
    parts = [(HERE / "intro.md").read_text("utf-8")]
    about = next((content["about"] for name in GPU if (content := read(name))["about"]), None)
    if about:
        parts += [f"\n## GPU\n\n{about}; median seconds per round:\n\n", gpu_table()]
        for name, column in GPU.items():
            if read(name)["timings"]:
                parts += [f"\n`{name}` ({column}):\n\n", detail_table(name)]
    parts += ["\n## CPU\n"]
    for name in CPU:
        if (cpu := read(name))["about"]:
            parts += [f"\n{cpu['about']}; `{name}`:\n\n", detail_table(name)]
    return "".join([*parts, "\n", (HERE / "rest.md").read_text("utf-8")])


def readme() -> str:
    return with_part("speed", summary())


def write() -> None:
    (HERE / "README.md").write_text(page(), "utf-8")
    README.write_text(readme(), "utf-8")
