"""The load of a vLLM server, from the Prometheus text at its `/metrics`."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rollout_service.engines.contract import BackendLoad
from rollout_service.engines.errors import BackendProtocolError

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"
_CAPACITY = "vllm:cache_config_info"
_SAMPLED = "vllm:generation_tokens_total"
_READ = "vllm:prompt_tokens_total"
_NAMES = (_RUNNING, _WAITING, _USAGE, _CAPACITY, _SAMPLED, _READ)


def parse_load(text: str) -> BackendLoad:
    """Return the load, summed over the engines behind one server.

    Raises:
        BackendProtocolError: A figure is missing or is not a number.
    """
    try:
        return _load_of(list(_samples(text)))
    except (ValueError, OverflowError) as error:  # among them NaN and infinity, which are no counts
        raise BackendProtocolError(f"/metrics has a figure that cannot be read: {error}") from error


def _load_of(samples: list[Sample]) -> BackendLoad:
    capacity = sum(int(_tokens(sample)) for sample in samples if sample.name == _CAPACITY) or None
    usage = max((sample.value for sample in samples if sample.name == _USAGE), default=0.0)
    running, waiting = _total(samples, _RUNNING), _total(samples, _WAITING)
    done = (_total(samples, _SAMPLED), _total(samples, _READ))
    return BackendLoad(
        running=running,
        waiting=waiting,
        used_tokens=round(usage * (capacity or 0)),
        capacity_tokens=capacity,
        signature=f"{running} {waiting} {usage} {done}",
    )


def _samples(text: str) -> Iterator[Sample]:
    """Parse only the few samples that are used, of hundreds."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_NAMES))
    for family in text_string_to_metric_families(lines + "\n"):
        yield from family.samples


def _total(samples: list[Sample], name: str) -> int:
    values = [sample.value for sample in samples if sample.name == name]
    if not values:
        raise BackendProtocolError(f"/metrics has no {name}", hint="Start vLLM without --disable-log-stats.")
    return int(sum(values))


def _tokens(sample: Sample) -> int:
    """Return the KV tokens of one engine; 0 if it does not report them."""
    size = sample.labels.get("kv_cache_size_tokens", "")
    if size.isdigit():
        return int(size)
    blocks, length = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
    return int(blocks) * int(length) if blocks.isdigit() and length.isdigit() else 0
