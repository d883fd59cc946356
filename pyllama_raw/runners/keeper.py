"""
Starts a server that ends with the process that wants it, even if that is killed.

    python keeper.py PID NAME COMMAND...

This process becomes the server: its id and its exit code are the server's. It runs as a file
and imports nothing of the package, so it takes milliseconds.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CANNOT_RUN = 127  # as of a shell


def main(parent: int, name: str, command: list[str]) -> None:
    """Become *command*; Linux kills it when the thread that started it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(CANNOT_RUN)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"Failed to spawn {name}: {error}\n")
        sys.exit(CANNOT_RUN)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
