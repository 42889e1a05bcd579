"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> list[str]:
    """Lines of a table with columns as wide as needed; the columns named in `right` are numbers."""
    if not rows:
        return []
    shown = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        ).rstrip()
        for row in shown
    ]
