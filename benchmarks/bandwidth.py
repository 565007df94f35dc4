"""The GPU's copy and read bandwidth in TB/s, as JSON: 4 GiB of random bits, the best of a few launch shapes."""

from __future__ import annotations

import json

from ostinato.cli.bench.bandwidth import measure_bandwidth

if __name__ == "__main__":
    print(json.dumps(measure_bandwidth()))
