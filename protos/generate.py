"""Generates headrace/v1 from protos/, or with --check says whether it is up to date.

The stubs are checked in, so that users need no protobuf compiler, and are never edited.
"""

import argparse
import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = Path("headrace/v1")


def generate(destination: Path) -> None:
    """Write the stubs of every proto file below `destination`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={destination}",
            f"--mypy_out={destination}",
            f"--grpc_python_out={destination}",
            f"--mypy_grpc_out={destination}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


def stale_files() -> list[str]:
    """Stubs that differ from what the protos give, or are missing or left over."""
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate(fresh)
        names = {path.name for path in (fresh / PACKAGE).iterdir()}
        present = {path.name for path in (ROOT / PACKAGE).glob("*_pb2*")}
        _, differing, missing = filecmp.cmpfiles(
            fresh / PACKAGE, ROOT / PACKAGE, sorted(names), shallow=False
        )
        return sorted({*differing, *missing, *(present - names)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    if stale := stale_files():
        print("stale stubs, run `make protos`:", *stale, sep="\n  ")
        sys.exit(1)


if __name__ == "__main__":
    main()
