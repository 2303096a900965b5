"""torch_gpumode.run: parents that outlive a killed rank, started by hand and by real torchrun."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_gpumode import run

DEADLINE_S = 60.0

# The script of every rank: writes its pid, then does what its argument says. No torch, so fast.
SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
rank, here = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])

def write(name, text=""):
    (here / f"{name}.part{rank}").write_text(str(text))
    (here / f"{name}.part{rank}").rename(here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

write(f"pid{rank}", os.getpid())
exec(sys.argv[2 + rank])
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The process's state letter, or "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Job:
    """One parent per rank, as an agent would start them; every rank runs its own line of code."""

    def __init__(self, folder: Path, *code: str, world_size: int | None = None) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        self.env = os.environ | {
            "TMPDIR": str(folder / "tmp"),
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1234",
            "WORLD_SIZE": str(world_size or len(code)),
        }
        (folder / "tmp").mkdir(exist_ok=True)
        self.code = code
        self.parents = {rank: self.start(rank) for rank in range(len(code))}

    def start(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch_gpumode.run", "script.py", ".", *self.code]
        return subprocess.Popen(
            command,
            env=self.env | {"RANK": str(rank)},
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def child(self, rank: int) -> int:
        """The pid of the rank's child, once it runs."""
        self.wait_for(f"pid{rank}")
        return int((self.folder / f"pid{rank}").read_text())

    def wait_for(self, name: str) -> None:
        wait_until((self.folder / name).exists, f"file {name}")

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def codes(self) -> list[int]:
        return [parent.wait(DEADLINE_S) for parent in self.parents.values()]

    def close(self) -> None:
        for parent in self.parents.values():
            parent.kill()  # the child dies with it
            parent.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as stack:

        def start(*code: str, world_size: int | None = None) -> Job:
            job = Job(tmp_path, *code, world_size=world_size)
            stack.callback(job.close)
            return job

        yield start


def test_parent_imports_no_torch() -> None:
    code = "import sys, torch_gpumode.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S).returncode == 0


def test_killed_rank_waits_for_the_others(job: Callable[..., Job]) -> None:
    j = job("wait_for('go')", "die()", "wait_for('go')")
    dead = j.child(1)
    wait_until(lambda: state_of(dead) == "", "the killed child is reaped")
    with pytest.raises(subprocess.TimeoutExpired):
        j.parents[1].wait(0.5)
    j.touch("go")
    assert j.codes() == [0, 0, 0]
    assert "rank 1 was killed by SIGKILL" in j.parents[1].communicate()[1]
    assert os.listdir(j.folder / "tmp") == []


def test_all_killed_is_a_failure(job: Callable[..., Job]) -> None:
    j = job("die()", "os.kill(os.getpid(), signal.SIGSEGV)")
    assert j.codes() == [-signal.SIGKILL, -signal.SIGSEGV]
    assert os.listdir(j.folder / "tmp") == []


def test_failed_survivor_is_a_failure(job: Callable[..., Job]) -> None:
    j = job("wait_for('go'); sys.exit(7)", "die()")
    wait_until(lambda: state_of(j.child(1)) == "", "the killed child is reaped")
    j.touch("go")
    assert j.codes() == [7, -signal.SIGKILL]


def test_exit_code_passes_at_once(job: Callable[..., Job]) -> None:
    j = job("wait_for('never')", "raise ValueError('a bug')")
    assert j.parents[1].wait(DEADLINE_S) == 1
    assert "a bug" in j.parents[1].communicate()[1]
    assert j.parents[0].poll() is None


def test_child_dies_with_its_parent_and_nobody_waits_for_it(job: Callable[..., Job]) -> None:
    j = job("wait_for('go')", "wait_for('never')", "die()")
    child = j.child(1)
    j.child(0)
    j.parents[1].kill()
    wait_until(lambda: state_of(child) == "", "the child is gone")
    j.touch("go")
    assert j.codes() == [0, -signal.SIGKILL, 0]


def test_late_rank_is_waited_for(job: Callable[..., Job]) -> None:
    j = job("die()", world_size=2)
    wait_until(lambda: state_of(j.child(0)) == "", "the killed child is reaped")
    j.code = ("", "time.sleep(0.3)")
    j.parents[1] = j.start(1)
    assert j.codes() == [0, 0]


def test_what_a_dead_job_left_is_ignored(job: Callable[..., Job], monkeypatch) -> None:
    j = job()
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, j.env[name])
    remains = j.folder / "tmp" / os.path.basename(run.board_path())
    remains.write_bytes(b"\0ff")
    j.code = ("die()", "die()")
    j.env["WORLD_SIZE"] = "2"
    j.parents = {rank: j.start(rank) for rank in range(2)}
    assert j.codes() == [-signal.SIGKILL, -signal.SIGKILL]
    assert not remains.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_child_once(job: Callable[..., Job], number: signal.Signals) -> None:
    j = job(
        f"seen = []; signal.signal({int(number)}, lambda *_: seen.append(write('seen')));"
        "write('ready'); wait_for('go'); sys.exit(40 + len(seen))"
    )
    j.wait_for("ready")
    os.killpg(j.parents[0].pid, number)  # as the agent does it
    j.wait_for("seen")
    time.sleep(0.1)  # for a second one, which must not come
    j.touch("go")
    assert j.codes() == [41]


def test_death_that_was_asked_for_is_not_hidden(job: Callable[..., Job]) -> None:
    j = job("wait_for('never')", "wait_for('never')")
    j.child(0), j.child(1)
    j.parents[1].terminate()
    assert j.parents[1].wait(DEADLINE_S) == -signal.SIGTERM
    assert j.parents[0].poll() is None


def test_waiting_parent_ends_when_told(job: Callable[..., Job]) -> None:
    j = job("wait_for('never')", "die()")
    wait_until(lambda: state_of(j.child(1)) == "", "the killed child is reaped")
    j.parents[1].terminate()
    assert j.parents[1].wait(DEADLINE_S) == -signal.SIGKILL


def test_stop_and_continue(job: Callable[..., Job]) -> None:
    j = job("wait_for('go')")
    child = j.child(0)
    j.parents[0].send_signal(signal.SIGTSTP)
    wait_until(lambda: state_of(child) == "T", "the child stops")
    wait_until(lambda: state_of(j.parents[0].pid) == "T", "the parent stops")
    j.parents[0].send_signal(signal.SIGCONT)
    wait_until(lambda: state_of(child) in "SR", "the child goes on")
    j.touch("go")
    assert j.codes() == [0]


def test_stopped_rank_that_the_others_left_behind(job: Callable[..., Job]) -> None:
    j = job(
        "wait_for('stopped')", "write('stopped'); os.kill(os.getpid(), signal.SIGSTOP)", "die()"
    )
    assert j.codes() == [0, 0, 0]


def test_several_stopped_ranks(job: Callable[..., Job]) -> None:
    stop = "write(f'stopped{rank}'); os.kill(os.getpid(), signal.SIGSTOP)"
    j = job("wait_for('stopped1'); wait_for('stopped2')", stop, stop)
    assert j.codes() == [0, 0, 0]


def test_workers_of_a_killed_child_are_killed(job: Callable[..., Job]) -> None:
    j = job(
        "worker = subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3);"
        "write('worker', worker.pid); wait_for('go'); die()",
        "wait_for('end')",
    )
    j.wait_for("worker")
    worker = int((j.folder / "worker").read_text())
    assert state_of(worker) in "SR"
    j.touch("go")
    wait_until(lambda: state_of(worker) in ("", "Z"), "the worker is gone")
    j.touch("end")
    assert j.codes() == [0, 0]


def test_environment_is_unchanged(job: Callable[..., Job]) -> None:
    j = job("write('env', '\\0'.join(f'{k}={v}' for k, v in sorted(os.environ.items())))")
    assert j.codes() == [0]
    expected = j.env | {"RANK": "0"}
    assert (j.folder / "env").read_text().split("\0") == [
        f"{k}={v}" for k, v in sorted(expected.items())
    ]


def test_module_and_usage(tmp_path: Path) -> None:
    def go(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch_gpumode.run", *args]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S
        )

    (tmp_path / "module.py").write_text("import sys; print(sys.argv[1:]); sys.exit(5)")
    result = go("-m", "module", "--its", "args")
    assert (result.stdout, result.returncode) == ("['--its', 'args']\n", 5)
    for bad in ([], ["-m"], ["--its"]):
        result = go(*bad)
        assert result.returncode == 1
        assert result.stderr.startswith("usage: ")


# With torchrun itself, whose start takes seconds: only what a hand-started parent cannot show.


def torchrun(folder: Path, *code: str, options: list[str]) -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "torch_gpumode.run"]
    env = os.environ | {"TMPDIR": str(folder / "tmp")}
    return subprocess.Popen([*command, "script.py", ".", *code], cwd=folder, env=env)


def boards(folder: Path) -> list[Path]:
    return list((folder / "tmp").glob("torch_gpumode-run-*"))


def test_torchrun_with_one_agent_and_a_restart(tmp_path: Path) -> None:
    first = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    agent = torchrun(
        tmp_path,
        f"wait_for('never') if {first} else time.sleep(0.5); write('survivor0')",
        f"sys.exit(3) if {first} else die()",
        f"wait_for('never') if {first} else time.sleep(0.5); write('survivor2')",
        options=["--nproc-per-node=3", "--max-restarts=1"],
    )
    assert agent.wait(DEADLINE_S) == 0
    assert (tmp_path / "survivor0").exists()
    assert (tmp_path / "survivor2").exists()
    assert boards(tmp_path) == []


def test_torchrun_with_one_agent_per_rank(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    agents = [
        torchrun(
            tmp_path,
            "die()",  # with it would go the agent that serves the store
            "time.sleep(1); write('survivor')",
            options=[
                "--nnodes=2",
                f"--node-rank={rank}",
                "--nproc-per-node=1",
                "--master-addr=localhost",
                f"--master-port={port}",
            ],
        )
        for rank in range(2)
    ]
    assert [agent.wait(DEADLINE_S) for agent in agents] == [0, 0]
    assert (tmp_path / "survivor").exists()
    assert boards(tmp_path) == []


def test_torchrun_when_all_are_killed(tmp_path: Path) -> None:
    agent = torchrun(tmp_path, "die()", "die()", options=["--nproc-per-node=2"])
    assert agent.wait(DEADLINE_S) == 1
    assert boards(tmp_path) == []
