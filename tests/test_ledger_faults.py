"""Second writers, forks, full disks and kill -9."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dprc_lightning.accounting import chained_log
from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger, LedgerLockedError
from dprc_lightning.errors import LedgerError

EVENT = {"noise_multiplier": 1.25, "sample_rate": 0.05224, "sketch_dim": 32}
META = {"num_records": 1225, "sample_rate": 0.05224}


@pytest.fixture
def run(tmp_path):
    """A run folder whose ledger holds 3 steps."""
    with Ledger.create(tmp_path, META) as ledger:
        for _ in range(3):
            ledger.reserve(EVENT).take()
    return tmp_path


def lines(run: Path) -> list[bytes]:
    return (run / LEDGER_NAME).read_bytes().splitlines(keepends=True)


def test_second_writer_is_refused_and_readers_are_not(run):
    ledger = Ledger.open(run)
    with pytest.raises(LedgerLockedError, match="another process"):
        Ledger.open(run)
    other = f"from dprc_lightning.accounting.ledger import Ledger; Ledger.open({str(run)!r})"
    result = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
    assert "LedgerLockedError" in result.stderr
    reader = Ledger.open(run, read_only=True)
    assert reader.steps == 3 and not reader.writable
    with pytest.raises(LedgerError, match="not open for writing"):
        reader.reserve(EVENT)
    ledger.close()
    with pytest.raises(LedgerError, match="not open for writing"):
        ledger.reserve(EVENT)
    Ledger.open(run).close()


def test_a_ledger_that_is_dropped_holds_no_lock(run):
    ledger = Ledger.open(run)
    ledger.reserve(EVENT, count=2)
    del ledger
    assert Ledger.open(run).steps == 5


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_can_neither_write_nor_keep_the_lock(run):
    ledger = Ledger.open(run)
    reservation = ledger.reserve(EVENT, count=2)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        refused = 0
        for use in (reservation.take, lambda: ledger.reserve(EVENT)):
            try:
                use()
            except LedgerError:
                refused += 1
        os.write(write, bytes([refused]))
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(read, 1) == bytes([2])
        assert reservation.take() == 3
        with pytest.raises(LedgerLockedError):
            Ledger.open(run)
        ledger.close()
        Ledger.open(run).close()  # although the child lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("change", ["append", "truncate", "unlink"])
def test_change_behind_our_back_stops_the_run(run, change):
    ledger = Ledger.open(run)
    path = run / LEDGER_NAME
    if change == "append":
        with path.open("ab") as stream:
            stream.write(b"x")
    elif change == "truncate":
        os.truncate(path, 100)
    else:
        path.unlink()
    for match in ("changed or deleted", "failed before"):
        with pytest.raises(LedgerError, match=match):
            ledger.reserve(EVENT)
    assert not ledger.writable
    ledger.close()


def test_disk_full_begins_no_step_and_can_be_tried_again(run, monkeypatch):
    ledger = Ledger.open(run)
    before, pwrite = (run / LEDGER_NAME).read_bytes(), os.pwrite

    def half(descriptor, data, offset):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[: len(data) // 2], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        with pytest.raises(LedgerError, match="No space left on device.*no step may begin"):
            ledger.reserve(EVENT)
    assert (run / LEDGER_NAME).read_bytes() == before
    assert ledger.steps == 3 and ledger.writable
    assert ledger.reserve(EVENT).take() == 3
    ledger.close()
    assert Ledger.open(run, read_only=True).steps == 4


def test_disk_full_on_a_torn_file_keeps_the_note(run, monkeypatch):
    with (run / LEDGER_NAME).open("ab") as stream:
        stream.write(b'{"count"')
    ledger = Ledger.open(run)

    def full(descriptor, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(LedgerError):
            ledger.reserve(EVENT)
    assert ledger.reserve(EVENT).take() == 3
    ledger.close()
    assert [json.loads(line)["type"] for line in lines(run)][-3:] == ["torn", "reserve", "close"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failed_fsync_is_never_believed(run, monkeypatch, error):
    ledger = Ledger.open(run)

    def failing(descriptor):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises((LedgerError, KeyboardInterrupt)):
            ledger.reserve(EVENT)
    assert not ledger.writable
    with pytest.raises(LedgerError, match="failed before"):
        ledger.reserve(EVENT)
    ledger.close()
    # The line did reach the disk: counted, never handed out.
    with Ledger.open(run) as ledger:
        assert ledger.steps == 4 and ledger.reserve(EVENT).take() == 4


def test_interrupt_after_the_write_ends_the_ledger(run, monkeypatch):
    ledger = Ledger.open(run)

    def interrupted(entry):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve(EVENT)
    assert not ledger.writable
    with Ledger.open(run) as ledger:
        assert ledger.reserve(EVENT).take() == 4


def test_interrupt_between_the_entry_and_its_object(run, monkeypatch):
    """The entry is in the chain, the reservation in nobody's hands: closing must not close another one."""
    ledger = Ledger.open(run)
    ledger.reserve(EVENT, count=2).take()
    write = ledger._write

    def interrupted(entries):
        write(entries)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve(EVENT, count=3)
    ledger.close()
    with Ledger.open(run) as ledger:
        assert ledger.steps == 8 and ledger.reserve(EVENT).take() == 8


def test_a_failed_create_leaves_no_file(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    for name in ("pwrite", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            with pytest.raises(LedgerError, match="Input/output error"):
                Ledger.create(tmp_path, META)
        assert list(tmp_path.iterdir()) == []
    Ledger.create(tmp_path, META).close()


CHILD = """
import os, random, sys, types
# The package's own __init__ may load more than the ledger needs.
package = types.ModuleType("dprc_lightning.accounting")
package.__path__ = [os.path.join(sys.argv[1], "accounting")]
sys.modules["dprc_lightning.accounting"] = package
from dprc_lightning.accounting.ledger import Ledger
from dprc_lightning.errors import LedgerError
run, seed = sys.argv[2], int(sys.argv[3])
assert "torch" not in sys.modules
rng = random.Random(seed)
ledger = Ledger.open(run)
applied = os.open(os.path.join(run, "applied"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print("ready", flush=True)
try:
    while True:
        reservation = ledger.reserve({"sigma": rng.choice([1.0, 2.0])}, count=rng.choice([1, 1, 1, 2, 5]))
        for _ in range(rng.randint(1, reservation.count)):
            os.write(applied, b"%d\\n" % reservation.take())
            os.fsync(applied)
except LedgerError as error:
    sys.exit(f"refused: {error}")
"""


def child(run: Path, seed: int, **options) -> subprocess.Popen:
    package = str(Path(chained_log.__file__).parents[1])
    command = [sys.executable, "-c", CHILD, package, str(run), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def applied_steps(run: Path) -> list[int]:
    return [int(line) for line in (run / "applied").read_text().splitlines()]


def test_kill_9_at_any_moment_never_counts_too_little(tmp_path):
    Ledger.create(tmp_path, META).close()
    rng = random.Random(0)
    for restart in range(12):
        process = child(tmp_path, restart)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.communicate()
        ledger = Ledger.open(tmp_path, read_only=True)
        applied = applied_steps(tmp_path)
        assert ledger.steps == sum(count for _, count in ledger.spent()) >= len(applied)
        assert applied == sorted(set(applied)), "a sequence number was handed out twice"
        assert not applied or applied[-1] < ledger.next_sequence
    assert len(applied) > 20


def test_real_file_size_limit_begins_no_step(tmp_path):
    Ledger.create(tmp_path, META).close()
    limit = 5000
    process = child(tmp_path, 0, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, error = process.communicate(timeout=30)
    assert "refused" in error and "cannot be written" in error
    ledger = Ledger.open(tmp_path, read_only=True)
    assert ledger.torn_bytes == 0
    assert 10 < len(applied_steps(tmp_path)) <= ledger.steps


def test_a_long_ledger_opens_fast(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with Ledger.create(tmp_path, META) as ledger:
        for _ in range(20_000):
            ledger.reserve(EVENT).take()
    start = time.process_time()
    ledger = Ledger.open(tmp_path, read_only=True)
    assert time.process_time() - start < 0.4  # 100,000 lines in 2 s on a busy machine; 0.6 s when it is idle
    assert ledger.spent() == [(EVENT, 20_000)]
