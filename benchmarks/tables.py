"""Tables of results: for a terminal, for a Markdown page and for programs."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Table:
    """Rows under a header; a cell is text, or a number shown with three digits or more."""

    title: str
    head: Sequence[str]
    rows: list[Sequence[str | float]] = field(default_factory=list)

    def text(self) -> str:
        """Columns aligned, for a terminal."""
        lines = [self.head, *([_shown(cell) for cell in row] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        padded = (
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join([self.title, *("  " + line for line in padded)])

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.head, ["---"] * len(self.head)]
        lines += [[_shown(cell) for cell in row] for row in self.rows]
        rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{rows}\n"

    def as_json(self) -> dict[str, object]:
        """The table as JSON values, numbers unrounded."""
        return {
            "title": self.title,
            "rows": [dict(zip(self.head, row, strict=True)) for row in self.rows],
        }


def _shown(cell: str | float) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or cell >= 1000:
        return f"{cell:.0f}"
    return f"{cell:.3g}"
