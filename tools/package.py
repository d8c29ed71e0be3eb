"""Build wheel and sdist, and use each as somebody would who has nothing else: `make package`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def main() -> None:
    for old in DIST.glob("fedge-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as empty:
        python = environment(Path(empty) / "build")
        call(python, *PIP, "install", "-c", str(ROOT / "constraints.txt"), "build", "hatchling")
        call(python, "-m", "build", "--no-isolation", "--outdir", str(DIST), str(ROOT), quiet=True)
    for package in sorted(DIST.glob("fedge-*")):
        use(package)


def environment(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


def use(package: Path) -> None:
    """Install with what the command line needs, ask for help, train, export, and import from Python."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = environment(folder / "venv")
        wanted = f"fedge[cli,report,export] @ {package.resolve().as_uri()}"
        call(python, *PIP, "install", "-c", str(ROOT / "constraints.txt"), wanted)
        here = folder / "here"
        here.mkdir()
        call(python, "-m", "fedge", "--help", cwd=here, quiet=True)
        call(python, "-m", "fedge", "run", "--quiet", "--set", "train.rounds=2", "--out", "first", cwd=here)
        call(python, "-m", "fedge", "export", "first/fedova", "fedova.safetensors", cwd=here)
        for file in ("first/report.html", "first/accuracy.png", "fedova.safetensors"):
            if not (here / file).stat().st_size:
                sys.exit(f"{package.name}: {file} is empty")
        call(python, "-c", "import fedge; print(fedge.__version__, fedge.data.load('digits'))", cwd=here)
    print(f"{package.name}: installed, run and exported in an empty environment")


def call(*command: str, cwd: Path | None = None, quiet: bool = False) -> None:
    subprocess.run(command, check=True, cwd=cwd, stdout=subprocess.DEVNULL if quiet else None)


if __name__ == "__main__":
    main()
