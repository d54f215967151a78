"""`EngineStats` for Prometheus; needs the package ``prometheus-client`` (extra ``metrics``)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from radixkv.cache.stats import CacheStats
from radixkv.engine.engine import Engine
from radixkv.engine.stats import EngineStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Everything else is a gauge.
_COUNTERS = {
    "requests_done",
    "requests_failed",
    "requests_aborted",
    "prompt_tokens",
    "cached_tokens",
    "prefill_tokens",
    "decode_tokens",
    "steps",
    "kv_bytes_read",
    "kv_bytes_alone",
    "preemptions",
    "lookups",
    "lookup_tokens",
    "hit_tokens",
    "evicted_pages",
    "cow_copies",
}


class EngineCollector:
    """Gives an engine's statistics at each scrape; register it with a Prometheus registry.

    It does not keep the engine alive, and gives nothing once the engine is closed.

    Args:
        engine: whose `Engine.stats` are read.
        name: the label ``engine`` of every metric, to tell engines of one process apart.

    Each number of `EngineStats` is ``radixkv_<name>`` (``radixkv_cache_<name>`` for those of
    `CacheStats`), a counter if it only grows; what is not known yet is left out.
    """

    def __init__(self, engine: Engine, *, name: str = "default") -> None:
        self._engine = weakref.ref(engine)
        self._name = name

    def collect(self) -> Iterator[Metric]:
        """One metric family for each number, as ``prometheus_client`` asks for them."""
        engine = self._engine()
        if engine is None or engine.is_closed:
            return
        stats = engine.stats()
        yield from self._families("radixkv", EngineStats, stats)
        yield from self._families("radixkv_cache", CacheStats, stats.cache)

    def _families(self, prefix: str, kind: type[Any], stats: Any) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for field in fields(kind):
            value = getattr(stats, field.name)
            if not isinstance(value, (int, float)):
                continue
            family = CounterMetricFamily if field.name in _COUNTERS else GaugeMetricFamily
            help_text = f"{kind.__name__}.{field.name} of radixkv"
            metric = family(f"{prefix}_{field.name}", help_text, labels=["engine"])
            metric.add_metric([self._name], float(value))
            yield metric
