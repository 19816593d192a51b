"""Measure the cost of sandboxes: session latency, and the time, CPU time, and memory of each; with others' beside them.

Run: python benchmarks/sandboxes.py [--json FILE] [--quick | --smoke] [--peer docker|inspect|nemo_gym|swerex|none]

One run on one machine measures real Apptainer with the base image and this project's defaults, and four others: Docker,
whose daemon it starts, and NeMo Gym's Apptainer provider with the same image; Inspect's local sandbox and SWE-ReX's
local runtime, which isolate nothing. Docker needs root and scripts/install-docker. The rest are in .venv-sandbox-peers,
which scripts/install-sandbox-peers makes. The figures of what cannot run here are null.

- `bash_p50_ms`, `exec_p50_ms`: a trivial command in the open bash of a running sandbox, and as a new process in it.
- `docker_*`, `inspect_*`, `nemo_gym_*`, `swerex_*`: of each of the others, `run_p50_ms`: the same command in a running
  sandbox, as a new process in it, and for SWE-ReX in an open bash; `start_p50_s`: from the call that starts one to the
  answer to the first command; `parallel_sleep_s`: `sleep 1` in 16 of them at once, from one process; `time_outs`: how
  often it ran into its own. `bash_speedup_vs_*` is their `run_p50_ms` over our `bash_p50_ms`.
- `cold_start_*`: from the call that starts a sandbox until both of its sessions are open; `_bash_`: until bash is open.
  `close_*`: from the call that closes it until nothing of it is left.
- `cpu_s_per_sandbox_*`: CPU time of all processes over the same starts and closes, including the benchmark's own
  process, by `support/accounting.py`; `host_cpu_*` is the CPU time of the whole machine meanwhile.
- `parallel_sleep_s`: `sleep 1` in 16 sandboxes at once.
- `starts_per_second`: sandboxes that were started, had both sessions opened and were closed, by 8 tasks at once.
- `mb_per_sandbox_*`: memory of each of many live sandboxes, with both sessions open or only bash. It is the larger of
  two figures: the memory of their processes plus the growth of this process and of the kernel's memory, and the drop
  in the machine's available memory.
- `warm_acquire_p50_ms`: from the call until the warm pool hands out a sandbox with both sessions open. It was started
  before, and its start is not in this time.
- `limit_*`: the same in the barest loop without this project: a line to a bash, a cell to a kernel on the host.
  `bare_*`: the cost of starting the parts by themselves.
"""

import sys
from importlib import import_module

# This file has the name of the package that it measures, and Python searches a program's own folder first. From here on
# it searches that folder last. A benchmark that imports the package gets this file first, which then makes room.
sys.path.append(sys.path.pop(0))

if __name__ == "__main__":
    from common import run
    from support.sandbox_costs import main
    from support.sandbox_peers import PEERS

    run(main, "Measure the cost of sandboxes.", {"peer": ["all", *PEERS, "none"]})
else:
    del sys.modules[__name__]
    import_module(__name__)
