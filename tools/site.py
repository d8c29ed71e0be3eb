"""The documentation as a site: `make site`.

The pages of the repository are copied as they lie, so that links between them hold, with every file that they link to.
Examples become pages with their code and what they print; the reference is read off the docstrings. mkdocs then builds
the whole, with warnings as errors and without a network.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fedge
import fedge.edge

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OWN = ROOT / "examples" / "own_parts" / "pumps.toml"
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
TITLES = {
    "fedge.algorithms": "Algorithms",
    "fedge.codecs": "Codecs",
    "fedge.combine": "Rules that combine uploads",
    "fedge.core": "The contract",
    "fedge.data": "Data",
    "fedge.edge": "The edge",
    "fedge.losses": "Losses",
    "fedge.metrics": "Metrics",
    "fedge.models": "Models",
    "fedge.partition": "Partitions",
    "fedge.report": "Reports and trackers",
    "fedge.sweep": "Sweeps",
}
MORE = {  # names that pages use, of packages that are not loaded with fedge
    "fedge.edge": fedge.edge.__all__,
    "fedge.report": ("Tracker", "headline", "open_tracker", "write_report"),
    "fedge.sweep": ("run_sweep",),
}


def main(stage: Path, out: Path) -> None:
    shutil.rmtree(stage, ignore_errors=True)
    for page in [ROOT / name for name in PAGES] + sorted((ROOT / "docs").glob("*.md")):
        copy_page(page, stage)
    for example in EXAMPLES:
        write(stage / example.relative_to(ROOT).with_suffix(".md"), example_page(example))
    write(stage / "examples" / "README.md", gallery())
    copy_page(ROOT / "examples" / "own_parts" / "README.md", stage)
    draw(stage)
    for name, text in reference():
        write(stage / "reference" / name, text)
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([*command, "--site-dir", str(out.resolve())], check=True, cwd=ROOT, env=quiet)
    print(f"{out / 'index.html'}: {sum(1 for _ in out.rglob('*.html'))} pages")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def copy_page(page: Path, stage: Path) -> None:
    """A page, and what it links to; a link to an example leads to the page that it becomes."""
    there = stage / page.relative_to(ROOT)
    if there.exists():
        return
    write(there, "")  # so that pages which link to each other end

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        file = (page.parent / target).resolve()
        if file.is_dir():
            file, target = file / "README.md", f"{target.rstrip('/')}/README.md"
        if file in EXAMPLES:
            return f"{text}({target.removesuffix('.py')}.md{anchor})"
        copy(file, stage)
        return f"{text}({target}{anchor})"

    write(there, LINK.sub(link, page.read_text("utf-8")))


def copy(file: Path, stage: Path) -> None:
    if file.suffix == ".md":
        copy_page(file, stage)
        return
    there = stage / file.relative_to(ROOT)
    there.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, there)


def example_page(example: Path) -> str:
    """What an example is about, what it prints, and its code."""
    code = example.read_text("utf-8")
    about = ast.get_docstring(ast.parse(code)) or ""
    title, _, rest = about.partition("\n")
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True, cwd=ROOT)
    title_line = f"# {example.stem.replace('_', ' ').capitalize()}\n\n{title}\n{rest}"
    picture = f"![Curves of this example]({example.stem}.png)"
    printed = f"`python examples/{example.name}` prints:\n\n```text\n{done.stdout}```"
    return f"{title_line}\n\n{picture}\n\n{printed}\n\n```python\n{code}```\n"


def gallery() -> str:
    """Every example with its picture: test accuracy against rounds and megabytes."""
    lines = ["# Examples", "", "Complete programs, each a few seconds long, with the curves of what they train.", ""]
    for example in EXAMPLES:
        about = (ast.get_docstring(ast.parse(example.read_text("utf-8"))) or "").partition("\n")[0]
        title = example.stem.replace("_", " ").capitalize()
        lines += [f"## [{title}]({example.stem}.md)", "", about, "", f"![Curves of {title}]({example.stem}.png)", ""]
    lines += [
        "## [Parts of your own in a file](own_parts/README.md)",
        "",
        "An experiment file and the Python file it names.",
        "",
    ]
    lines += [f"![Curves of the pumps]({OWN.stem}.png)", ""]
    return "\n".join(lines)


def draw(stage: Path) -> None:
    """The pictures of the gallery: each example is run once more, with its rounds kept."""
    for example in [*EXAMPLES, OWN]:
        picture = stage / "examples" / f"{example.stem}.png"
        subprocess.run([sys.executable, "tools/gallery.py", str(example), str(picture.resolve())], check=True, cwd=ROOT)


def reference() -> Iterator[tuple[str, str]]:
    """One page per module that offers public names, and one for what is used with all of them."""
    rest: list[str] = []
    for module, names in fedge._PLACES.items():
        if module in TITLES:
            yield page_of(module, [f"{module}.{name}" for name in names])
        else:
            rest += [f"{module}.{name}" for name in names]
    for name in fedge._MODULES:
        module = f"fedge.{name}"
        public = getattr(fedge, name).__all__
        yield page_of(module, [f"{module}.{one}" for one in public])
    for module, names in MORE.items():
        yield page_of(module, [f"{module}.{name}" for name in names])
    yield "README.md", "# Reference\n\nTraining, runs and federations.\n\n" + "\n".join(map(entry, rest))


def page_of(module: str, names: list[str]) -> tuple[str, str]:
    return f"{module.removeprefix('fedge.')}.md", f"# {TITLES[module]}\n\n" + "\n".join(map(entry, names))


def entry(name: str) -> str:
    return f"::: {name}\n    options:\n      heading_level: 2\n"


if __name__ == "__main__":
    main(Path("build/site-pages"), Path("build/site"))
