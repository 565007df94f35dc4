"""One sitting: both halves of a comparison measured in turn on the same GPU. Numbers of two sittings are never mixed.

A stamp says which sitting a half belongs to. It holds hashes where the thing itself would identify a machine.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

HALVES = ("ostinato", "peer")

_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_SAME = ("id", "gpus", "gpu_hash", "driver", "boot_hash")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.@+~-]+){2,}")


class MixedSittingsError(ValueError):
    """Halves that were not measured together, or did not measure the same."""


def new_id() -> str:
    return uuid.uuid4().hex


def stamp(sitting_id: str) -> dict[str, Any]:
    """Read anew for every half, so that a half of another machine carries another stamp. None where unknown."""
    gpus = _nvidia_smi()
    return {
        "id": sitting_id,
        "gpus": [name for name, _, _ in gpus] or None,
        "gpu_hash": _hash(" ".join(sorted(number for _, number, _ in gpus))) if gpus else None,
        "driver": gpus[0][2] if gpus else None,
        "boot_hash": _hash(_BOOT_FILE.read_text()) if _BOOT_FILE.is_file() else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def load(path: Path) -> dict[str, Any]:
    """A result of `compare.py`. Raises MixedSittingsError if its halves do not belong together."""
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or report.get("benchmark") != "compare":
        raise MixedSittingsError(f"{path.name} is not a result of compare.py")
    require_one_sitting(report)
    return report


def require_one_sitting(report: dict[str, Any]) -> None:
    """Raises MixedSittingsError that names the model, the half and what differs."""
    for entry in report["models"]:
        for half in HALVES:
            if entry.get(half) is None:
                continue
            found = entry[half].get("sitting") or {}
            if differing := [name for name in _SAME if found.get(name) != report["sitting"].get(name)]:
                pairs = ", ".join(
                    f"{name} {found.get(name)} and not {report['sitting'].get(name)}" for name in differing
                )
                raise MixedSittingsError(
                    f"{entry['name']}: the half of {half} comes from another sitting ({pairs}): only what was measured "
                    "on one GPU in one sitting may be compared; run compare.py again"
                )
        _require_same_requests(entry)


def _require_same_requests(entry: dict[str, Any]) -> None:
    ours = ((entry.get("ostinato") or {}).get("throughput") or {}).get("workload") or {}
    theirs = (entry.get("peer") or {}).get("throughput") or {}
    for name in ("prompt_tokens", "output_tokens"):
        if name in ours and name in theirs and ours[name] != theirs[name]:
            raise MixedSittingsError(
                f"{entry['name']}: the throughput runs differ in {name} ({ours[name]} and {theirs[name]})"
            )


def without_paths(text: str) -> str:
    """Absolute paths cut to their last part: a result says nothing about the machine's folders."""
    return _ABSOLUTE_PATH.sub(lambda found: found.group().rsplit("/", 1)[1], text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def _nvidia_smi() -> list[tuple[str, str, str]]:
    """(name, UUID, driver) of every GPU."""
    command = ["nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [tuple(part.strip() for part in line.split(",")) for line in done.stdout.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]
