"""`benchmarks/cases.py`: a case in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import CaseError, run_case

SCRIPT = """
import sys

from cases import hand_over

*words, option, case = sys.argv[1:]
assert option == "--inside"
print("something a library says")
if case != "silent":
    hand_over({"words": words, "case": case})
sys.exit(case == "bad")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "benchmarks"))
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_the_result_comes_back(script: Path) -> None:
    assert run_case(script, ["a", "--b"], "one") == {"words": ["a", "--b"], "case": "one"}


@pytest.mark.parametrize(("case", "code"), [("bad", 1), ("silent", 0)])
def test_neither_a_failure_nor_silence_is_a_result(script: Path, case: str, code: int) -> None:
    with pytest.raises(CaseError, match=f"{case} ended with exit code {code}"):
        run_case(script, [], case)
