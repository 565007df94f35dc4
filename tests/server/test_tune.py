"""`ostinato tune` on a server that runs: its ladder is what the engine itself would take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.main import main
from ostinato.cli.traffic import read_traffic

from ..e2e.models import TinyModel
from .conftest import open_llm
from .running import running


@pytest.mark.parametrize("with_key", [False, True])
def test_from_a_server(model: TinyModel, with_key: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"api_keys": ["secret"]} if with_key else {}
    headers = {"Authorization": "Bearer secret"} if with_key else {}
    found, saved = tmp_path / "found.json", tmp_path / "metrics.txt"
    with running(lambda: open_llm(model, enable_prefix_caching=False), **options) as server:
        assert main(["tune", server.url]) == 2
        assert "has run no step" in capsys.readouterr().err
        body = {"prompt": "abcde", "max_tokens": 12, "ignore_eos": True, "n": 3}
        server.post("/v1/completions", body, headers=headers)
        server.wait_idle()
        assert main(["tune", server.url + "/", "--json", str(found)]) == 0
        saved.write_text(server.get("/metrics").text)
        assert main(["tune", server.url + "/v2"]) == 2
        assert ("answers 401" if with_key else "answers 404") in capsys.readouterr().err
        traffic = read_traffic(server.url)
        recordings = server.between_steps(lambda llm: llm.stats().recordings)
        counts = server.between_steps(lambda llm: llm.stats().live_sizes)
        done = server.between_steps(lambda llm: llm.reconfigure(cudagraph_capture_sizes="auto"))
    facts = json.loads(found.read_text())
    assert 3 in done.capture_sizes
    assert facts["options"]["cudagraph_capture_sizes"] == {
        "uniform": list(done.capture_sizes),
        "mixed": list(done.mixed_capture_sizes),
    }
    assert sorted(traffic.counts, key=repr) == sorted(counts, key=repr)
    assert read_traffic(str(saved)).counts == traffic.counts
    assert traffic.mean_bytes == sum(line.num_bytes for line in recordings) // len(recordings)
    by_size = {line.num_rows: line.num_bytes for line in recordings if line.query_len is not None}
    assert traffic.recording_bytes.get("uniform") == (None if with_key else by_size)
