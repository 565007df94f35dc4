"""What an import costs, measured in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ostinato

SRC = Path(__file__).parents[2] / "src"
STANDARD = "import argparse, dataclasses, importlib.metadata, inspect, logging"
"""What a command line may well import, as the measure of the machine. Ours take as long, torch twenty times that."""


def cpu_seconds(code: str) -> float:
    """User and system time of a Python process that runs `code`; fails the test if the code fails."""
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SRC)})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.fixture(scope="module")
def limit_s() -> float:
    return 4 * min(cpu_seconds(STANDARD) for _ in range(3))


@pytest.mark.parametrize(
    "code",
    [
        "import ostinato",
        "import ostinato; ostinato.SamplingParams(); ostinato.ConfigError",
        "from ostinato.cli.main import main; main(['--help'])",
        "from ostinato.cli.main import main; main(['--version'])",
        "from ostinato.cli.main import main; main(['generate', '--help'])",
        "from ostinato.cli.main import main; main(['serve', '--help'])",
        "from ostinato.cli.main import main; main(['bench', '--help'])",
        "from ostinato.cli.main import main; main(['bench', 'decode', '--help'])",
    ],
)
def test_is_quick_and_needs_no_torch(code: str, limit_s: float) -> None:
    check = f"{code}\nimport sys; assert 'torch' not in sys.modules"
    assert min(cpu_seconds(check) for _ in range(3)) < limit_s


def test_all_names_can_be_imported() -> None:
    for name in ostinato.__all__:
        assert getattr(ostinato, name) is not None
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = ostinato.nonesuch
