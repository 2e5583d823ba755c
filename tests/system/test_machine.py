"""What the machine has, against what the system says of it elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from fedmpq.system.machine import available_cores, physical_memory


def test_only_cores_that_this_process_may_use_count() -> None:
    assert available_cores() == len(os.sched_getaffinity(0))
    core = min(os.sched_getaffinity(0))
    script = (
        f"import os\nos.sched_setaffinity(0, {{{core}}})\n"
        "from fedmpq.system.machine import available_cores\nprint(available_cores())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_memory_is_what_the_kernel_reports() -> None:
    kilobytes = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert kilobytes is not None
    assert physical_memory() == 1024 * int(kilobytes[1])
