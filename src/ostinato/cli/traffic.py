"""Where `ostinato tune` reads steps from: a server, its metrics in a file, its step log, or lines of batch sizes."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ostinato.errors import ConfigError
from ostinato.graphs.dispatch import LiveCount

_TIMEOUT_S = 10.0
_SIZES, _CONFIG = "ostinato:step_live_sizes_total", "ostinato:graph_config_info"
_BYTES, _RECORDINGS = "ostinato:graph_recording_bytes", "ostinato:graph_recordings"
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_KINDS = {"uniform": 1, "mixed": None}


@dataclass(slots=True)
class Traffic:
    """Steps by live size, and what else the source knows: `config` by the names of engine options, bytes of recordings
    by kind and size, and their mean."""

    counts: list[LiveCount]
    config: dict[str, Any] = field(default_factory=dict)
    recording_bytes: dict[str, dict[int, int]] = field(default_factory=dict)
    mean_bytes: int | None = None


def read_traffic(source: str) -> Traffic:
    """Raises ConfigError for a source that cannot be read or understood."""
    if urlsplit(source).scheme in ("http", "https"):
        return _from_server(source)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{source} is not text") from None
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}; give a file, or the URL of a server") from None
    if text.lstrip()[:1] in ("{", "["):
        return _from_json(text, source)
    if text.lstrip().startswith("# HELP") or re.search(r"^ostinato:", text, re.MULTILINE):
        return _from_metrics(text, source)
    return _from_lines(text, source)


def _from_server(url: str) -> Traffic:
    parts = urlsplit(url)
    path = parts.path.rstrip("/") or "/metrics"
    metrics = urlunsplit(parts._replace(path=path))
    traffic = _from_metrics(_fetch(metrics), metrics)
    try:
        state = json.loads(_fetch(urlunsplit(parts._replace(path=path.removesuffix("/metrics") + "/graphs/state"))))
        traffic.recording_bytes = _recording_bytes(state["recordings"])
    except (ConfigError, ValueError, KeyError, TypeError):
        pass  # it may need a key; the mean will do
    return traffic


def _fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answers {error.code} {error.reason}: is it an Ostinato server?") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise ConfigError(f"{url} cannot be reached: {cause}; is the server running?") from None
    return body.decode("utf-8", "replace")


def _recording_bytes(recordings: Iterable[dict[str, Any]]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for line in recordings:
        kind, size = ("mixed", "num_tokens") if line["query_len"] is None else ("uniform", "num_rows")
        found[kind][int(line[size])] = int(line["bytes"])
    return dict(found)


def _from_metrics(text: str, source: str) -> Traffic:
    counts: list[LiveCount] = []
    config: dict[str, Any] = {}
    values: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("ostinato:"):
            continue
        match = _SAMPLE.match(line)
        try:
            if match is None:
                raise ValueError
            labels, value = dict(_LABEL.findall(match["labels"] or "")), float(match["value"])
            if match["name"] == _SIZES:
                query_len = None if labels["query_len"] == "-" else int(labels["query_len"])
                counts.append(LiveCount(query_len, int(labels["size"]), int(value)))
            elif match["name"] == _CONFIG:
                config = {"cudagraph_mode": labels["cudagraph_mode"]}
                config |= {name: int(labels[name]) for name in ("max_num_seqs", "max_num_batched_tokens")}
            values[match["name"]] = value
        except (ValueError, KeyError):
            raise ConfigError(f"{source}, line {number}: not a metric of Ostinato: {line[:80]!r}") from None
    if not counts and not config:
        raise ConfigError(f"{source} has no {_SIZES}: is it what the /metrics of an Ostinato server says?")
    if not any(line.count for line in counts):
        raise ConfigError(f"{source}: the server has run no step that a ladder could serve: send it requests first")
    recordings = values.get(_RECORDINGS, 0)
    return Traffic(counts, config, mean_bytes=int(values.get(_BYTES, 0) / recordings) if recordings else None)


def _from_json(text: str, source: str) -> Traffic:
    """What `/graphs/steps` says, or its list of steps alone."""
    try:
        found = json.loads(text)
        steps = found["steps"] if isinstance(found, dict) else found
        rows_and_tokens = [(int(step["rows"]), int(step["tokens"])) for step in steps]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{source} has no list of steps, each with rows and tokens, as /graphs/steps gives") from None
    counts = [
        LiveCount(1, rows, 1) if rows == tokens else LiveCount(None, tokens, 1) for rows, tokens in rows_and_tokens
    ]
    return _checked(counts, source)


def _from_lines(text: str, source: str) -> Traffic:
    """`8`, `8,120` or `uniform,8,120` or `mixed,300`: a kind (uniform), a size, a number of steps (1). `#` begins a
    comment, a first line of names is left out."""
    counts: list[LiveCount] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").replace(";", " ").split()
        if not words or (not counts and not any(word.isdecimal() for word in words)):
            continue
        kind = words.pop(0) if words[0] in _KINDS else "uniform"
        if not 1 <= len(words) <= 2 or not all(word.isdecimal() for word in words) or int(words[0]) < 1:
            raise ConfigError(
                f"{source}, line {number}: {line.strip()[:80]!r} is not a batch: write a size, `size,steps` or "
                "`mixed,size,steps`, in whole numbers"
            )
        counts.append(LiveCount(_KINDS[kind], int(words[0]), int(words[1]) if len(words) == 2 else 1))
    return _checked(counts, source)


def _checked(counts: list[LiveCount], source: str) -> Traffic:
    if not any(line.count for line in counts):
        raise ConfigError(f"{source} holds no steps")
    if any(line.size < 1 for line in counts):
        raise ConfigError(f"{source} holds steps of size 0 or below")
    return Traffic(counts)
