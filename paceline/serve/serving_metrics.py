"""What Prometheus is told of a server, at `/metrics`. Every name begins with `paceline_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServingMetrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("paceline_requests", "Requests, by HTTP status.", ["status"], registry=registry)
        self.request_seconds = Histogram(
            "paceline_request_seconds", "From arrival to answer.", buckets=_SECONDS, registry=registry
        )
        self.queue_seconds = Histogram(
            "paceline_queue_seconds", "From arrival to a process.", buckets=_SECONDS, registry=registry
        )
        self.compute_seconds = Histogram(
            "paceline_compute_seconds", "Of the model, a batch.", buckets=_SECONDS, registry=registry
        )
        self.batch_rows = Histogram("paceline_batch_rows", "Rows a batch.", buckets=_ROWS, registry=registry)
        self.batch_requests = Histogram(
            "paceline_batch_requests", "Requests a batch.", buckets=_ROWS, registry=registry
        )
        self.queue_depth = Gauge("paceline_queue_depth", "Requests that wait for a process.", registry=registry)
        self.refused = Counter("paceline_refused", "Requests refused, by why.", ["why"], registry=registry)
        self.left = Counter("paceline_left", "Requests whose client went away before the answer.", registry=registry)
        self.processes = Gauge("paceline_processes", "Processes of the model that are ready.", registry=registry)
        self.deaths = Counter("paceline_process_deaths", "Processes that ended unasked.", registry=registry)
        self.version = Gauge("paceline_model_version", "The version that answers.", registry=registry)
        self.reloads = Counter("paceline_reloads", "Versions loaded, or not.", ["outcome"], registry=registry)

    def text(self) -> bytes:
        """Returns everything in Prometheus's text format."""
        return generate_latest(self._registry)
