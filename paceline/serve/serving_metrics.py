"""What Prometheus is told of a server, at `/metrics`. Every name begins with `paceline_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServingMetrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def seconds(name: str, words: str) -> Histogram:
            return Histogram(name, words, buckets=_SECONDS, registry=registry)

        def gauge(name: str, words: str) -> Gauge:
            return Gauge(name, words, ["member"], registry=registry)

        self.requests = Counter("paceline_requests", "Requests, by HTTP status.", ["status"], registry=registry)
        self._requests_of: dict[int, Counter] = {}  # by status: to look for a label takes as long as to count
        self.request_seconds = seconds("paceline_request_seconds", "From arrival to answer.")
        self.queue_seconds = seconds("paceline_queue_seconds", "From arrival to a process.")
        self.compute_seconds = seconds("paceline_compute_seconds", "Of the model, a batch.")
        self.batch_rows = Histogram("paceline_batch_rows", "Rows a batch.", buckets=_ROWS, registry=registry)
        self.batch_requests = Histogram(
            "paceline_batch_requests", "Requests a batch.", buckets=_ROWS, registry=registry
        )
        self.answers = Counter("paceline_answers", "Requests that were answered by the model.", registry=registry)
        self.refused = Counter("paceline_refused", "Requests refused, by why.", ["why"], registry=registry)
        self.left = Counter("paceline_left", "Requests whose client went away before the answer.", registry=registry)
        self.deaths = Counter("paceline_process_deaths", "Processes that ended unasked.", registry=registry)
        self.reloads = Counter("paceline_reloads", "Versions loaded, or not.", ["outcome"], registry=registry)
        self.missing = Counter(
            "paceline_member_missing", "Answers of an ensemble without this member.", ["member"], registry=registry
        )
        self.queue_depth = gauge("paceline_queue_depth", "Requests that wait for a process.")
        self.processes = gauge("paceline_processes", "Processes of the model that are ready.")
        self.version = gauge("paceline_model_version", "The version that answers.")
        self.step = gauge("paceline_model_step", "The step of the followed training that answers.")
        self.source_lost = gauge("paceline_source_lost", "1 while there is no way to the source of new versions.")

    def count_request(self, status: int) -> None:
        """Counts a request by its status; 0 is one whose client went away."""
        if (counter := self._requests_of.get(status)) is None:
            counter = self._requests_of[status] = self.requests.labels(str(status or "gone"))
        counter.inc()

    def text(self) -> bytes:
        """Returns everything in Prometheus's text format."""
        return generate_latest(self._registry)
