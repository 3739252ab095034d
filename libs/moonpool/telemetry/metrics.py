"""Metrics: one Prometheus registry per process, instruments made from names.py."""

from __future__ import annotations

from collections.abc import Mapping

import prometheus_client as prometheus
from prometheus_client.metrics import MetricWrapperBase

from moonpool.telemetry import names
from moonpool.telemetry.names import Metric, MetricKind

CONTENT_TYPE = prometheus.exposition.CONTENT_TYPE_LATEST


class Metrics:
    """A registry of its own: two services in one test do not share counts.

    Args:
        metrics: What this process has; others raise KeyError when they are used.
    """

    def __init__(self, metrics: tuple[Metric, ...] = names.METRICS) -> None:
        self._registry = prometheus.CollectorRegistry()
        #: By name and labels, those that were used.
        self._children: dict[tuple[object, ...], MetricWrapperBase] = {}
        #: By name and label values: what somebody else's count has reached.
        self._told: dict[tuple[str, ...], int] = {}
        prometheus.ProcessCollector(registry=self._registry)
        self._instruments: dict[str, MetricWrapperBase] = {
            metric.name: _make(metric, self._registry) for metric in metrics
        }

    def count(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        instrument = self._child(metric, labels)
        assert isinstance(instrument, prometheus.Counter), metric
        instrument.inc(amount)

    def count_to(self, metric: Metric, total: int, **labels: str) -> None:
        """Bring a counter up to what somebody else has counted from 0 on. Nobody else adds to it."""
        key = (metric.name, *(labels[name] for name in metric.labels))
        self.count(metric, total - self._told.get(key, 0), **labels)
        self._told[key] = total

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        instrument = self._child(metric, labels)
        assert isinstance(instrument, prometheus.Gauge), metric
        instrument.set(value)

    def forget(self, metric: Metric, **labels: str) -> None:
        """Tell these label values no more, until they are used again."""
        assert set(labels) == set(metric.labels), (metric.name, labels)
        self._instruments[metric.name].remove(*(labels[name] for name in metric.labels))
        self._children.clear()

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add one observation to a histogram, in the unit of its name."""
        instrument = self._child(metric, labels)
        assert isinstance(instrument, prometheus.Histogram), metric
        instrument.observe(value)

    def counter(self, metric: Metric, **labels: str) -> prometheus.Counter:
        """A counter with its labels bound: for what is counted per token."""
        instrument = self._child(metric, labels)
        assert isinstance(instrument, prometheus.Counter), metric
        return instrument

    def histogram(self, metric: Metric, **labels: str) -> prometheus.Histogram:
        """A histogram with its labels bound: for what is observed per token."""
        instrument = self._child(metric, labels)
        assert isinstance(instrument, prometheus.Histogram), metric
        return instrument

    def value(self, metric: Metric, **labels: str) -> float:
        """A counter's or gauge's value, 0 if it has never been touched; a histogram's count."""
        suffix = "_count" if metric.kind is MetricKind.HISTOGRAM else ""
        return self._registry.get_sample_value(metric.name + suffix, labels) or 0.0

    def render(self) -> bytes:
        """The text that Prometheus scrapes; its type is CONTENT_TYPE."""
        return prometheus.generate_latest(self._registry)

    def _child(self, metric: Metric, labels: Mapping[str, str]) -> MetricWrapperBase:
        key = (metric.name, *labels.items())
        child = self._children.get(key)
        if child is None:
            assert set(labels) == set(metric.labels), (metric.name, labels)
            instrument = self._instruments[metric.name]
            child = instrument.labels(**labels) if labels else instrument
            self._children[key] = child
        return child


def _make(metric: Metric, registry: prometheus.CollectorRegistry) -> MetricWrapperBase:
    match metric.kind:
        case MetricKind.COUNTER:
            return prometheus.Counter(metric.name, metric.help, metric.labels, registry=registry)
        case MetricKind.GAUGE:
            return prometheus.Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case MetricKind.HISTOGRAM:
            return prometheus.Histogram(
                metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry
            )
