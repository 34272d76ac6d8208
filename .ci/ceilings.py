"""Fails when a file has outgrown its room (docs/contributing.md, "Ceilings")."""

import subprocess
import sys
from pathlib import Path

MAX_LINES = 400
# The first prefix that matches counts.
MAX_LINES_BY_PREFIX = {
    "gpuworker/attention/": 450,
    "gpuworker/models/": 450,
    "tests/": 500,
}


def max_lines(path: str) -> int:
    """The ceiling of a file."""
    matches = (n for prefix, n in MAX_LINES_BY_PREFIX.items() if path.startswith(prefix))
    return next(matches, MAX_LINES)


def main() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    too_long = []
    for name in listed:
        if name.startswith("headrace/v1/") or not Path(name).exists():
            continue
        lines = len(Path(name).read_text(encoding="utf-8").splitlines())
        if lines > max_lines(name):
            too_long.append(f"{name}: {lines} lines, at most {max_lines(name)}")
    if too_long:
        print(*too_long, sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
