"""A connector of another package, found by its entry point: the one of the documentation, as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ostinato import ConfigError
from ostinato.connectors.registry import names

from .conftest import TinyFactory
from .connecting import open_llm, stats_of
from .driving import greedy
from .models import prompts_of

PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs what the page shows: its module and its entry point."""
    text = PAGE.read_text()
    (code,) = re.findall(r"```python\n(\"\"\"my_package.*?)```", text, re.S)
    ((name, where),) = re.findall(r'^(\w+) = "(my_package:\w+)"$', text, re.M)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 40
    (tmp_path / "my_package.py").write_text(code)
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[ostinato.kv_connectors]\n{name} = {where}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)


@pytest.mark.usefixtures("package")
def test_the_connector_of_the_page(tiny_model: TinyFactory, tmp_path: Path) -> None:
    model = tiny_model("Llama")
    prompts = prompts_of((70, 40), 160, seed=95)
    transfer = {
        "kv_connector": "SQLiteConnector",
        "kv_connector_extra_config": {"path": str(tmp_path / "kv.db"), "cpu_bytes_to_use": 1 << 22},
    }
    assert "SQLiteConnector" in names()
    for hits in ([0, 0], [64, 32]):
        with open_llm(model.path, transfer) as llm:
            outputs = llm.generate(prompts, greedy(5))
            assert [list(out.outputs[0].token_ids) for out in outputs] == [model.greedy(p, 5) for p in prompts]
            assert [output.num_cached_tokens for output in outputs] == hits
            assert stats_of(llm).hit_tokens == sum(hits)
            assert stats_of(llm).failed_loads == stats_of(llm).failed_saves == 0
    transfer["kv_connector_extra_config"]["colour"] = "red"  # type: ignore[index]
    with pytest.raises(ConfigError, match="colour: the options are"):
        open_llm(model.path, transfer)
