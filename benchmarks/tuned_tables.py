"""Writing what a tuner found into the module that holds its table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_table(path: Path, name: str, table: Mapping[Any, Any]) -> None:
    """Replaces the entries of the dictionary `name: Final[...] = {...}` in a module, sorted by key; all else stays.

    Raises ValueError where there is no such dictionary.
    """
    text = path.read_text()
    opening = text.index(" = {", text.index(f"\n{name}: Final["))
    end = text.index("}\n", opening) + 2
    rows = "".join(f"    {key!r}: {value!r},\n".replace("'", '"') for key, value in sorted(table.items()))
    path.write_text(text[:opening] + (" = {\n" + rows if rows else " = {") + "}\n" + text[end:])
