"""
Starts a server that ends with the process that wants it, even if that is killed.

    python keeper.py NAME COMMAND...

This process becomes the server, so its id and its exit code are the server's. A second one
reads the standard input, a pipe of the owner, which ends when the owner does, and then kills
the server. It runs as a file and imports nothing of the package: it takes milliseconds.
"""

import os
import signal
import sys

CANNOT_RUN = 127  # as of a shell


def main(name: str, command: list[str]) -> None:
    """Become *command*, watched."""
    server, nothing = os.getpid(), os.open(os.devnull, os.O_RDWR)
    if os.fork() == 0:
        os.dup2(nothing, 1)  # the owner reads the server's output to its end
        os.dup2(nothing, 2)
        watch(server)
    os.dup2(nothing, 0)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"Failed to spawn {name}: {error}\n")
        sys.exit(CANNOT_RUN)


def watch(server: int) -> None:
    """Kill *server* when the owner has ended; end when it is gone."""
    os.read(0, 1)
    if os.getppid() == server:  # else it has ended, and its number may be another's
        os.kill(server, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
