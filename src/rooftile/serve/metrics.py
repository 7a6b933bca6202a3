"""Metrics in Prometheus' format: what requests waited and took, and what the engine's loop counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# Seconds: the first token of a short prompt on a large GPU to that of one that waited for minutes.
_FIRST = (0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.7, 1, 2, 4, 7, 10, 20, 40, 80, 160)
_TOKEN = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.4, 1)
_WHOLE = (0.1, 0.3, 1, 2, 4, 7, 10, 20, 40, 80, 160, 320, 640)

# Attributes of the engine's statistics. One that the engine does not count is left out.
_GAUGES = {
    "running": ("requests_running", "Sequences that hold a slot."),
    "waiting": ("requests_waiting", "Sequences in the queue."),
    "pages_used": ("cache_pages_used", "Pages of the cache in use."),
    "pages": ("cache_pages", "Pages of the cache."),
}
_COUNTERS = {
    "prompt_tokens": (
        "prompt_tokens",
        "Computed tokens of prompts: without those found in the prefix cache.",
    ),
    "generated_tokens": ("generated_tokens", "Generated tokens."),
    "prefix_query_tokens": ("prefix_cache_queried_tokens", "Tokens of prompts that the prefix cache was asked for."),
    "prefix_hit_tokens": ("prefix_cache_hit_tokens", "Tokens of prompts found in the prefix cache."),
    "preemptions": ("preemptions", "Sequences that gave back their pages to be computed again."),
    "steps": ("steps", "Steps of the model."),
    "proposed_tokens": ("proposed_tokens", "Tokens that speculative decoding proposed."),
    "accepted_tokens": ("accepted_tokens", "Proposed tokens that were accepted."),
}


class Metrics:
    """The metrics of one server, in a registry of their own.

    Attributes:
        stats: the engine's statistics; whoever reads the metrics puts them here before.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: Any = None
        self.registry.register(self)
        self.answers = Counter(
            "rooftile_http_requests", "HTTP requests by path and status.", ["path", "status"], registry=self.registry
        )
        self.requests = Counter(
            "rooftile_requests", "Requests by outcome: finished, aborted, failed.", ["outcome"], registry=self.registry
        )
        for outcome in ("finished", "aborted", "failed"):
            self.requests.labels(outcome)  # a rate needs the zero before the first
        self.finished = Counter(
            "rooftile_requests_finished", "Sequences by what ended them.", ["reason"], registry=self.registry
        )
        self.first_token = Histogram(
            "rooftile_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=_FIRST,
            registry=self.registry,
        )
        self.per_token = Histogram(
            "rooftile_time_per_output_token_seconds",
            "Of a sequence's tokens after its first, their mean time.",
            buckets=_TOKEN,
            registry=self.registry,
        )
        self.whole = Histogram(
            "rooftile_request_seconds", "From the request to its last token.", buckets=_WHOLE, registry=self.registry
        )

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        for attribute, (name, said) in _GAUGES.items():
            if (value := getattr(stats, attribute, None)) is not None:
                yield GaugeMetricFamily(f"rooftile_{name}", said, value=value)
        for attribute, (name, said) in _COUNTERS.items():
            if (value := getattr(stats, attribute, None)) is not None:
                yield CounterMetricFamily(f"rooftile_{name}", said, value=value)
        if getattr(stats, "pages", 0):
            yield GaugeMetricFamily(
                "rooftile_cache_usage", "Share of the cache's pages in use.", value=stats.pages_used / stats.pages
            )
