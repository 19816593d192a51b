"""The real programs that tests use, and the tier in which each is tested.

    python tests/support/plugins/parts.py 1 2     # print the parts of these tiers, in the order of their installation

`scripts/test` runs the first tier; `--all` adds the second.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A marker of the tests that use the part; `ensure_NAME` of `scripts/lib.sh` installs it."""

    name: str
    tier: int
    purpose: str
    paths: tuple[str, ...] = ()
    """Beginnings of paths. A commit that touches one of them puts the part's tests first in the second tier."""


PARTS = (
    Part("apptainer", 1, "starts real Apptainer sandboxes"),
    Part("redis", 1, "starts a real Redis server"),
    Part("browser", 1, "drives the pages in a real headless Chromium"),
    Part("sglang", 1, "starts the real SGLang on the CPU"),
    Part("slurm", 1, "starts a real Slurm in network namespaces"),
    Part(
        "harnesses",
        2,
        "runs the real programs of harnesses in their sandboxes",
        ("rollout_service/agents/harnesses/", "rollout_service/gateway/", "sandboxes/definitions/"),
    ),
    Part(
        "swe",
        2,
        "grades tasks of software repair with the real swebench",
        ("rollout_service/environments/swe/", "benchmarks/swe_instances.py"),
    ),
    Part(
        "vllm",
        2,
        "starts the real vLLM on the CPU",
        ("rollout_service/engines/kinds/", "rollout_client/adapters/engine", "deploy/vllm-cpu/"),
    ),
    Part(
        "valkey",
        2,
        "starts a real Valkey server",
        ("rollout_service/store/",),
    ),
    Part(
        "seaweedfs",
        2,
        "starts a real object store that speaks S3's API",
        ("rollout_service/store/",),
    ),
    Part(
        "trainers",
        2,
        "uses real trainers on the CPU",
        (
            "rollout_client/adapters/",
            "rollout_client/trainer_check/",
            "packaging/client/",
            "deploy/trainers-cpu/",
        ),
    ),
    Part(
        "bridges",
        2,
        "uses the real libraries of bridges",
        ("rollout_service/environments/bridges/", "rollout_service/authoring/"),
    ),
    Part(
        "harbor",
        2,
        "runs trials with the real Harbor",
        ("rollout_service/environments/harbor/", "sandboxes/harbor.py", "deploy/harbor/"),
    ),
    Part(
        "docker",
        2,
        "starts a real Docker daemon and containers",
        ("sandboxes/providers/", "sandboxes/contract/"),
    ),
    Part("perfetto", 2, "opens traces in Perfetto's own page", ("rollout_service/observability/tracing/",)),
    Part(
        "prometheus",
        2,
        "uses the real Prometheus and promtool",
        ("rollout_service/observability/telemetry/", "deploy/monitoring/"),
    ),
)


if __name__ == "__main__":
    tiers = {int(tier) for tier in sys.argv[1:]}
    sys.stdout.write("".join(f"{part.name}\n" for part in PARTS if part.tier in tiers))
