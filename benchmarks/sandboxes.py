"""Measures the cost of sandboxes: session latency, and the time, CPU time, and memory of each; SWE-ReX for comparison.

Run: python benchmarks/sandboxes.py [--json FILE] [--quick]

Real Apptainer with the base image, with this project's defaults, and SWE-ReX's local runtime (in .venv-swerex, which
scripts/install-swerex makes), in one run on one machine. SWE-ReX's sessions are bare shells without a sandbox.

- `cold_start_*`: from the call that starts a sandbox to both of its sessions open; `_bash_`: to bash alone.
  `close_*`: from the call that closes it until nothing of it is left.
- `cpu_s_per_sandbox_*`: CPU time of all processes over the same starts and closes, the benchmark's own process
  included, by `support/accounting.py`; `host_cpu_*` is what the whole machine spent meanwhile.
- `parallel_sleep_s`: `sleep 1` in 16 sandboxes at once; SWE-ReX: in 16 sessions of one runtime at once.
- `starts_per_second`: sandboxes that were started, had both sessions opened and were closed, by 8 tasks at once.
- `mb_per_sandbox_*`: so many live at once, both sessions open or bash alone. What their processes, the growth of this
  one and of the kernel's memory add up to, or the drop in the memory that the machine has available: the larger.
- `warm_acquire_p50_ms`: from the call until a sandbox of the warm pool is there with both sessions open.
- `limit_*`: the same without this project, by the barest loop: a line to a bash, a cell to a kernel on the host.
  `bare_*`: what starting the parts costs by themselves.
"""

import sys
from importlib import import_module

# This file is named as the package that it measures, and Python looks beside a program first: from here on it looks
# there last. A benchmark that imports the package gets this file first, which then makes room.
sys.path.append(sys.path.pop(0))

if __name__ == "__main__":
    from common import run
    from support.sandbox_costs import main

    run(main, "What sandboxes cost.")
else:
    del sys.modules[__name__]
    import_module(__name__)
