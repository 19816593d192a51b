"""Measure the cost of sandboxes: session latency, and the time, CPU time, and memory of each; SWE-ReX for comparison.

Run: python benchmarks/sandboxes.py [--json FILE] [--quick | --smoke] [--peer none]

One run on one machine measures real Apptainer with the base image and this project's defaults, and SWE-ReX's local
runtime (in .venv-swerex, which scripts/install-swerex makes). SWE-ReX's sessions are bare shells without a sandbox.

- `cold_start_*`: from the call that starts a sandbox until both of its sessions are open; `_bash_`: until bash is open.
  `close_*`: from the call that closes it until nothing of it is left.
- `cpu_s_per_sandbox_*`: CPU time of all processes over the same starts and closes, including the benchmark's own
  process, by `support/accounting.py`; `host_cpu_*` is the CPU time of the whole machine meanwhile.
- `parallel_sleep_s`: `sleep 1` in 16 sandboxes at once; for SWE-ReX, in 16 sessions of one runtime at once.
- `starts_per_second`: sandboxes that were started, had both sessions opened and were closed, by 8 tasks at once.
- `mb_per_sandbox_*`: memory of each of many live sandboxes, with both sessions open or only bash. It is the larger of
  two figures: the memory of their processes plus the growth of this process and of the kernel's memory, and the drop
  in the machine's available memory.
- `warm_acquire_p50_ms`: from the call until a sandbox of the warm pool is there with both sessions open.
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
    from support.sandbox_costs import PEER, main

    run(main, "Measure the cost of sandboxes.", {"peer": [PEER, "none"]})
else:
    del sys.modules[__name__]
    import_module(__name__)
