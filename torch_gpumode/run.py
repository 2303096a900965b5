"""Run a script under torchrun so that a killed rank does not end the others.

    torchrun --nproc-per-node=4 -m torch_gpumode.run script.py --its args
    torchrun --nproc-per-node=4 -m torch_gpumode.run -m package.module --its args

When a worker is killed, torchrun's agent ends or restarts all others. So each worker is only a
small parent here (no torch in it) that runs the script as its child, in the environment that
torchrun made. The child's end becomes the parent's:

- It exits, with whatever code: so does the parent, at once. An exception in the script ends the
  job, as it should.
- A signal kills it that the parent did not pass on: the parent hides that from the agent and
  waits until no rank's child runs any more. If one of them finished with exit code 0, so does the
  parent; if none did, it dies of its child's signal.
- It is stopped, by SIGSTOP say, and still is so when all others are done, or stopped themselves: it
  is killed, and then as above.
- It dies of a signal that was passed on, or after one that means "end" (SIGTERM, SIGINT, SIGHUP,
  SIGQUIT): that is what was asked for, and the parent dies of the same.

Signals that arrive at the parent go to the child's process group once each, because the child has
a group of its own, out of reach of the agent's killpg. SIGSTOP cannot be caught and stops the
parent only; SIGTSTP and SIGCONT are passed on. A child dies with its parent (PR_SET_PDEATHSIG),
and what a killed child leaves in its group, such as data-loader workers, is killed.

How a parent knows of the others: the parents of one job on one host share a file in the temporary
directory, so it does not matter how many agents they belong to. Each holds a lock on its own byte
while its child runs, which the kernel drops if the parent is killed, and writes there how its
child ended. The last to leave removes the file. Whoever finds nobody else there starts it anew,
so neither a restart (`--max-restarts`) nor the remains of a dead job can mislead anybody.

Ranks on other hosts are not seen: a parent waits for those of its own host, then its agent waits
for the other agents as it always does at the end (300 s). A host whose agent serves the job's
store should therefore not lose all of its ranks.
"""

import ctypes
import fcntl
import hashlib
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NoReturn

_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_PASSED_ON = _ENDING | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT}

_LOOK_S = 1.0  # how often a parent with a stopped child looks at the others
_POLL_S = 0.1  # how often a parent without a child looks at the others
_STOPPED_S = 5.0  # how long a child may be stopped that all others have left behind
_START_GRACE_S = 30.0  # agents of one host may start their ranks this far apart

_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("torch_gpumode.run")


class Board:
    """What the parents of one job on one host know of each other.

    Byte 0 is locked by all who are here (shared), byte 1 + r by the parent of rank r while its
    child runs. The locks are POSIX record locks: they belong to the process, not to the
    descriptor, so neither the child nor anything that it forks can keep them.
    """

    RUNNING, STOPPED, FINISHED, ENDED = b"r", b"s", b"f", b"e"

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self._path = path
        self._rank = rank
        self._world_size = world_size
        self._fd = self._enter()
        self._lock(fcntl.LOCK_EX, 1 + rank)
        os.pwrite(self._fd, self.RUNNING, 1 + rank)

    def _enter(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if self._try_lock(fd, fcntl.LOCK_EX, 0):
                os.ftruncate(fd, 0)  # nobody else is here: what it says is of another time
            fcntl.lockf(fd, fcntl.LOCK_SH, 1, 0)
            try:
                if os.path.samestat(os.stat(self._path), os.fstat(fd)):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)  # the last of others removed it between our open and our lock

    @staticmethod
    def _try_lock(fd: int, kind: int, byte: int) -> bool:
        try:
            fcntl.lockf(fd, kind | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _lock(self, kind: int, byte: int) -> None:
        fcntl.lockf(self._fd, kind, 1, byte)

    def child_is_stopped(self, stopped: bool) -> None:
        os.pwrite(self._fd, self.STOPPED if stopped else self.RUNNING, 1 + self._rank)

    def child_ended(self, *, finished: bool) -> None:
        """Tell the others that this rank's child is gone; finished: with exit code 0."""
        os.pwrite(self._fd, self.FINISHED if finished else self.ENDED, 1 + self._rank)
        self._lock(fcntl.LOCK_UN, 1 + self._rank)

    def others(self) -> Iterator[bytes]:
        """Each other rank's state; b"" for one that never was here."""
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            state = os.pread(self._fd, 1, 1 + rank).strip(b"\0")
            alive = (self.RUNNING, self.STOPPED)
            if state in alive and self._try_lock(self._fd, fcntl.LOCK_SH, 1 + rank):
                self._lock(fcntl.LOCK_UN, 1 + rank)
                # Its parent left between our look and our lock, or was killed with its child.
                state = os.pread(self._fd, 1, 1 + rank)
                state = self.ENDED if state in alive else state
            yield state

    def leave(self) -> None:
        self._lock(fcntl.LOCK_UN, 0)
        if self._try_lock(self._fd, fcntl.LOCK_EX, 0):
            os.unlink(self._path)
        os.close(self._fd)


def board_path() -> str:
    """The file that the parents of this job on this host share."""
    job = [
        os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    ]
    digest = hashlib.sha256("\0".join(job).encode()).hexdigest()[:16]
    return os.path.join(tempfile.gettempdir(), f"torch_gpumode-run-{os.getuid()}-{digest}")


def start(argv: list[str], signal_mask: set[int]) -> subprocess.Popen[bytes]:
    """Start python on `argv` in a process group of its own, to die with this process."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)

    # -u as torchrun has it; this process has one thread, so preexec_fn is safe.
    return subprocess.Popen([sys.executable, "-u", *argv], process_group=0, preexec_fn=before_exec)


def attend(child: subprocess.Popen[bytes], board: Board) -> tuple[int, bool]:
    """Pass signals on until the child ends, and kill it if it is stopped and all others are done.

    Returns its exit code, -N for signal N, and whether the signals that were passed on explain
    such a death. Needs SIGCHLD and all signals that are passed on to be blocked.
    """
    passed_on = set()
    stopped_at = math.inf
    while True:
        arrived = signal.sigtimedwait(_PASSED_ON | {signal.SIGCHLD}, _LOOK_S)
        stopped = time.monotonic() - stopped_at > _STOPPED_S
        board.child_is_stopped(stopped)
        if stopped and all_done(list(board.others())):
            logger.warning("killing a rank that is stopped and that all others have left behind")
            os.killpg(child.pid, signal.SIGKILL)
            stopped_at = math.inf
        if arrived is None:
            continue
        number = arrived.si_signo
        if number != signal.SIGCHLD:
            passed_on.add(number)
            os.killpg(child.pid, number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
            continue
        # WNOWAIT: while it is a zombie nobody else can get its number, or its group's.
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
            while (change := os.waitid(os.P_PID, child.pid, flags)) is not None:
                stopped = change.si_code == os.CLD_STOPPED
                stopped_at = time.monotonic() if stopped else math.inf
            continue
        if ended.si_code != os.CLD_EXITED:
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        return code, bool(passed_on & _ENDING) or -code in passed_on


def all_done(others: list[bytes]) -> bool:
    """Whether nobody goes on any more, and somebody has finished."""
    return Board.FINISHED in others and set(others) <= {Board.FINISHED, Board.ENDED, Board.STOPPED}


def wait_for_others(board: Board) -> bool:
    """Wait until no other rank's child runs on this host; whether one finished with code 0.

    Ends at once, with False, on a signal that means "end".
    """
    grace_ends = time.monotonic() + _START_GRACE_S
    while signal.sigtimedwait(_ENDING, _POLL_S) is None:
        others = list(board.others())
        waiting_for_start = b"" in others and time.monotonic() < grace_ends
        alive = board.RUNNING in others or board.STOPPED in others
        if not alive and not waiting_for_start:
            return board.FINISHED in others
    return False


def end_like(code: int) -> NoReturn:
    """End this process as the child ended, so that the agent reports what happened."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has dumped what matters
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.exit(code)


def main(argv: list[str]) -> NoReturn:
    if not argv or (argv[0].startswith("-") and (argv[0] != "-m" or len(argv) < 2)):
        sys.exit(
            f"usage: torchrun [options] -m torch_gpumode.run {{script.py | -m module}} [args]\n\n"
            f"{__doc__}"
        )
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))

    board = Board(board_path(), rank, world_size)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children would vanish unseen
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    code, asked_for = attend(start(argv, mask), board)
    board.child_ended(finished=code == 0)
    if code < 0 and not asked_for and world_size > 1:
        name = signal.Signals(-code).name
        logger.warning("rank %d was killed by %s; the other ranks go on", rank, name)
        if wait_for_others(board):
            code = 0
    board.leave()
    end_like(code)


if __name__ == "__main__":
    main(sys.argv[1:])
