"""`benchmarks/tuned_tables.py`: one table of a module is replaced, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.kernels import small_tuned
from tuned_tables import write_table


def test_what_is_there_is_written_as_it_was(tmp_path: Path) -> None:
    source = Path(small_tuned.__file__).read_text()
    copy = tmp_path / "small_tuned.py"
    copy.write_text(source)
    write_table(copy, "HEADS", small_tuned.HEADS)
    write_table(copy, "TUNED", small_tuned.TUNED)
    assert copy.read_text() == source


def test_each_table_on_its_own(tmp_path: Path) -> None:
    copy = tmp_path / "small_tuned.py"
    copy.write_text(Path(small_tuned.__file__).read_text())
    for fields in ((16, 64, 128, 1, 4, 3, True, 512), (32, 64, 128, 1, 4, 3, True, 512)):
        heads = {(9, 5, 16): fields, (9, 5, 8): fields}
        write_table(copy, "HEADS", heads)
        write_table(copy, "TUNED", {("plain", 7, 3, 8): None})
        found: dict[str, object] = {}
        exec(copy.read_text(), found)
        assert found["HEADS"] == heads and list(heads) != list(found["HEADS"])  # sorted
        assert found["TUNED"] == {("plain", 7, 3, 8): None}
    write_table(copy, "HEADS", {})
    assert copy.read_text().count(" = {}") == 1


def test_a_module_without_the_table_is_refused(tmp_path: Path) -> None:
    module = tmp_path / "other.py"
    module.write_text("\nTUNED: Final[dict[int, int]] = {}\n")
    with pytest.raises(ValueError, match="not found"):
        write_table(module, "HEADS", {})
    assert module.read_text() == "\nTUNED: Final[dict[int, int]] = {}\n"
