"""
Starts a server that ends with the process that wants it, even if that is killed.

    python keeper.py NAME COMMAND...

This process becomes the server, so its id and its exit code are the server's. A second one, the
keeper, reads the standard input, a pipe of the owner, which ends when the owner does, and then
kills the session: the server, what the server has started, and the keeper itself. It runs as a
file and imports nothing of the package, nor pathlib: it takes milliseconds.

The server leads a session of its own (see child.py). Its number cannot become another session's
while the keeper is in it.
"""

import os
import signal
import sys
from contextlib import suppress

CANNOT_RUN = 127  # as of a shell
PROCESSES = "/proc"  # of Linux; elsewhere a session is its first process group


def main(name: str, command: list[str]) -> None:
    """Become *command*, watched."""
    server, nothing = os.getpid(), os.open(os.devnull, os.O_RDWR)
    if os.fork() == 0:
        # The owner asks all of the session to end, and may be killed before it has.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.dup2(nothing, 1)  # the owner reads the server's output to its end
        os.dup2(nothing, 2)
        os.read(0, 1)
        kill_session(server)
        os._exit(0)
    os.dup2(nothing, 0)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"Failed to spawn {name}: {error}\n")
        sys.exit(CANNOT_RUN)


def kill_session(session: int) -> None:
    """Kill all processes of *session*; one of them must be there, so that its number holds."""
    own = os.getpid()
    # A group is killed at once, so none of it can start another process meanwhile. Programs with
    # job control, such as shells, have more groups in their session.
    for _ in range(100):
        targets = [pid for pid in members(session) if pid not in (session, own)]
        for pid in targets:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not targets:
            break
    with suppress(OSError):
        os.killpg(session, signal.SIGKILL)


def members(session: int) -> list[int]:
    """Processes of *session* that run."""
    running = []
    with suppress(OSError):
        for name in filter(str.isdecimal, os.listdir(PROCESSES)):  # noqa: PTH208
            with suppress(OSError):  # it has ended meanwhile
                if os.getsid(int(name)) == session and not is_zombie(name):
                    running.append(int(name))
    return running


def is_zombie(name: str) -> bool:
    """Whether the process has ended, and only its exit code is left."""
    with open(f"{PROCESSES}/{name}/stat", "rb") as file:  # noqa: PTH123
        return file.read().rpartition(b")")[2].split()[0] == b"Z"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
