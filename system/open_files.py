"""How many files and connections a process may have open."""

from __future__ import annotations

import resource


def allow_open_files(count: int) -> int:
    """Raise the process's limit to `count` open files if it is lower and the system lets it be raised; the
    limit from now on. Processes started after this inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return soft if soft != resource.RLIM_INFINITY else count
    for wanted in ((count, max(count, hard)), (min(count, hard), hard)):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
        except (ValueError, OSError):
            # Above the hard limit only a privileged process may go.
            continue
        return wanted[0]
    return soft
