"""Reads Prometheus' text form with the official parser."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(slots=True)
class Samples:
    samples: list[Sample]
    types: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Samples:
        families = list(text_string_to_metric_families(text))
        return cls(
            [sample for family in families for sample in family.samples],
            {family.name: family.type for family in families},
        )

    def of(self, name: str) -> list[Sample]:
        """Those of that name, without the prefix."""
        return [sample for sample in self.samples if sample.name == f"ostinato:{name}"]

    def total(self, name: str) -> float:
        found = self.of(name)
        assert found, name
        return sum(sample.value for sample in found)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in self.of(name)}
