"""Amendments and forks: what is declared later, and runs that go on from another run's ledger."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dprc_lightning.accounting import chained_log
from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger, LedgerLockedError
from dprc_lightning.errors import InvalidArgumentError, LedgerError

EVENT = {"noise_multiplier": 1.25, "sample_rate": 0.05224, "sketch_dim": 32}
OTHER = {"noise_multiplier": 2.0, "sample_rate": 0.05224, "sketch_dim": None}
META = {"num_records": 1225, "mechanism": {"steps": 10, "delta": 1e-5}}


@pytest.fixture
def folders(tmp_path):
    """A run folder whose ledger holds 3 steps, and two empty ones."""
    for name in ("parent", "child", "other"):
        (tmp_path / name).mkdir()
    with Ledger.create(tmp_path / "parent", META) as ledger:
        for _ in range(3):
            ledger.reserve(EVENT).take()
    return tmp_path / "parent", tmp_path / "child", tmp_path / "other"


def entries(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / LEDGER_NAME).read_text().splitlines()]


def forge(path: Path, *lines: dict) -> None:
    path.unlink(missing_ok=True)
    log = chained_log.ChainedLog.create(path, lines[0])
    log.append(lines[1:])
    log.release()


def fails(number: int):
    def failing(*_, **__):
        raise OSError(number, os.strerror(number))

    return failing


# -------------------------------------------------------------------------------------------------------- amendments


def test_an_amendment_replaces_top_level_names_and_is_read_again(folders):
    parent, *_ = folders
    with Ledger.open(parent) as ledger:
        ledger.amend({"mechanism": {"steps": 20}, "because": "more steps"})
        ledger.reserve(OTHER).take()
        ledger.amend({"because": None})
        meta = {"num_records": 1225, "mechanism": {"steps": 20}, "because": None}
        amendments = [(3, {"mechanism": {"steps": 20}, "because": "more steps"}), (4, {"because": None})]
        for reader in (ledger, Ledger.open(parent, read_only=True)):
            assert (reader.meta, reader.amendments) == (meta, amendments)
            assert reader.spent() == [(EVENT, 3), (OTHER, 1)] and reader.head == ledger.head
    assert entries(parent)[0]["meta"] == META
    assert Ledger.open(parent, read_only=True).meta == meta


def test_amend_is_on_disk_before_it_returns(folders, monkeypatch):
    parent, *_ = folders
    ledger, calls = Ledger.open(parent), []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(entries(parent)[-1]["type"]), fsync(descriptor)))
    ledger.amend({"a": 1})
    assert calls == ["amend"]
    monkeypatch.setattr(os, "fsync", fails(errno.EIO))
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.amend({"a": 2})
    assert not ledger.writable and ledger.meta["a"] == 1 and len(ledger.amendments) == 1


def test_an_open_reservation_stays_open_over_an_amendment(folders):
    parent, *_ = folders
    ledger = Ledger.open(parent)
    reservation = ledger.reserve(OTHER, count=5)
    assert reservation.take() == 3
    ledger.amend({"a": 1})
    assert [reservation.take(), reservation.take()] == [4, 5] and reservation.remaining == 2
    assert ledger.steps == Ledger.open(parent, read_only=True).steps == 8  # not closed yet: in full
    ledger.amend({"a": 2})
    ledger.close()
    with Ledger.open(parent) as ledger:
        assert ledger.spent() == [(EVENT, 3), (OTHER, 3)] and ledger.next_sequence == 6
        # The amendments are about the steps from 6 on: 6 and 7 were given back.
        assert ledger.amendments == [(6, {"a": 1}), (6, {"a": 2})]
        assert ledger.reserve(OTHER).take() == 6


def test_a_crash_after_an_amendment_counts_the_reservation_in_full(folders):
    parent, *_ = folders
    ledger = Ledger.open(parent)
    ledger.reserve(EVENT, count=4).take()
    ledger.amend({"a": 1})
    ledger._log.release()  # as a crash would
    with Ledger.open(parent) as ledger:
        assert (ledger.steps, ledger.amendments) == (7, [(7, {"a": 1})])
        ledger.amend({"a": 2})  # and a clean stop without a reservation of one's own gives nothing back
    assert Ledger.open(parent, read_only=True).steps == 7


def test_an_amendment_cuts_a_torn_line_and_notes_it(folders):
    parent, *_ = folders
    with (parent / LEDGER_NAME).open("ab") as stream:
        stream.write(b'{"count"')
    with Ledger.open(parent) as ledger:
        ledger.amend({"a": 1})
        assert ledger.torn_bytes == 0
    assert [entry["type"] for entry in entries(parent)][-2:] == ["torn", "amend"]


@pytest.mark.parametrize("meta", [{"sigma": float("nan")}, {"x": object()}, [1], None])
def test_only_json_can_be_declared(folders, meta):
    parent, *_ = folders
    with Ledger.open(parent) as ledger, pytest.raises(InvalidArgumentError, match="meta"):
        ledger.amend(meta)
    reader = Ledger.open(parent, read_only=True)
    assert reader.amendments == []
    with pytest.raises(LedgerError, match="not open for writing"):
        reader.amend({})


# ------------------------------------------------------------------------------------------------------------- forks


def test_a_fork_counts_what_was_spent_before_and_goes_its_own_way(folders):
    parent, child, _ = folders
    before = (parent / LEDGER_NAME).read_bytes()
    old = Ledger.open(parent, read_only=True)
    with Ledger.fork(parent, child, must_contain=old.head) as ledger:
        assert ledger.writable and ledger.path == child / LEDGER_NAME
        assert (ledger.parents, ledger.meta, ledger.spent()) == ([old.run_id], META, [(EVENT, 3)])
        assert ledger.run_id != old.run_id and ledger.next_sequence == 3
        assert (child / LEDGER_NAME).read_bytes().startswith(before)
        assert ledger.reserve(OTHER).take() == 3
    assert (parent / LEDGER_NAME).read_bytes() == before
    assert [path.name for path in child.iterdir()] == [LEDGER_NAME]
    with Ledger.open(parent) as ledger:
        assert ledger.reserve(EVENT).take() == 3
    assert Ledger.open(parent, read_only=True).spent() == [(EVENT, 4)]
    again = Ledger.open(child, read_only=True, must_contain=old.head)
    assert (again.spent(), again.parents, again.run_id) == (
        [(EVENT, 3), (OTHER, 1)],
        [old.run_id],
        entries(child)[5]["run"],
    )
    assert entries(child)[5] | {"hash": ""} == {
        "type": "fork", "run": again.run_id, "parent": old.run_id, "sequence": 3, "hash": ""
    }  # fmt: skip


def test_two_forks_are_two_runs_and_forks_can_be_forked(folders):
    parent, child, other = folders
    with Ledger.fork(parent, child) as first, Ledger.fork(parent, other) as second:
        assert first.run_id != second.run_id and first.head != second.head
        first.reserve(EVENT).take()
        first.amend({"a": 1})
        grandchild = other.parent / "grandchild.jsonl"
        with Ledger.fork(first.path, grandchild) as third:
            origin = Ledger.open(parent, read_only=True).run_id
            assert third.parents == [origin, first.run_id] and third.steps == 4
            assert (third.meta["a"], third.amendments) == (1, [(4, {"a": 1})])
    assert Ledger.open(grandchild, read_only=True).parents == [origin, first.run_id]


def test_a_running_run_can_be_forked_and_its_open_reservation_counts_in_full(folders):
    parent, child, other = folders
    with Ledger.open(parent) as running:
        reservation = running.reserve(OTHER, count=5)
        reservation.take()
        with pytest.raises(LedgerLockedError):
            Ledger.open(parent)
        with Ledger.fork(parent, child) as ledger:
            assert ledger.steps == ledger.next_sequence == 8
            assert reservation.take() == 4
        running.close()
    # The parent gave three steps back; the child cannot know of it and never gives them back.
    assert Ledger.open(parent, read_only=True).steps == 5
    assert Ledger.open(child, read_only=True).steps == 8
    lines = [{k: v for k, v in entry.items() if k != "hash"} for entry in entries(child)]
    forge(other / LEDGER_NAME, *lines, {"type": "close", "sequence": 3, "used": 1})
    with pytest.raises(LedgerError, match=f"line {len(lines) + 1} .*closes no open reservation"):
        Ledger.open(other)


def test_a_torn_line_is_not_copied(folders):
    parent, child, _ = folders
    with (parent / LEDGER_NAME).open("ab") as stream:
        stream.write(b'{"count":1,"event"')
    before = (parent / LEDGER_NAME).read_bytes()
    with Ledger.fork(parent, child) as ledger:
        assert ledger.torn_bytes == 0 and ledger.steps == 3
    assert [entry["type"] for entry in entries(child)][-2:] == ["close", "fork"]
    assert (parent / LEDGER_NAME).read_bytes() == before


def test_a_forked_ledger_has_one_writer_and_is_protected_like_any(folders):
    parent, child, _ = folders
    ledger = Ledger.fork(parent, child)
    with pytest.raises(LedgerLockedError):
        Ledger.open(child)
    other = f"from dprc_lightning.accounting.ledger import Ledger; Ledger.open({str(child)!r})"
    result = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
    assert "LedgerLockedError" in result.stderr
    ledger.reserve(EVENT).take()
    ledger.close()
    data = (child / LEDGER_NAME).read_bytes()
    for position in range(0, len(data) - 1, 7):
        changed = bytearray(data)
        changed[position] ^= 1
        (child / LEDGER_NAME).write_bytes(changed)
        with pytest.raises(LedgerError, match=r"line \d+ "):
            Ledger.open(child, read_only=True)


def test_an_existing_target_is_refused_and_kept(folders):
    parent, child, other = folders
    Ledger.create(child, {"mine": 1}).close()
    before = (child / LEDGER_NAME).read_bytes()
    (other / LEDGER_NAME).symlink_to("nowhere")
    for target in (child, child / LEDGER_NAME, parent, other):
        with pytest.raises(LedgerError, match="exists: .*choose another run folder"):
            Ledger.fork(parent, target)
    assert (child / LEDGER_NAME).read_bytes() == before
    with pytest.raises(LedgerError, match="writable run folder"):
        Ledger.fork(parent, child / "absent" / LEDGER_NAME)


def test_a_target_that_appears_meanwhile_is_kept(folders, monkeypatch):
    parent, child, _ = folders
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    Ledger.create(child, {"mine": 1}).close()
    before = (child / LEDGER_NAME).read_bytes()
    with pytest.raises(LedgerError, match="exists"):
        Ledger.fork(parent, child)
    assert (child / LEDGER_NAME).read_bytes() == before and len(list(child.iterdir())) == 1


def test_a_source_that_cannot_be_trusted_is_refused(folders):
    parent, child, other = folders
    head = Ledger.open(parent, read_only=True).head
    with Ledger.open(parent) as ledger:
        ledger.reserve(EVENT).take()
        later = ledger.head
    shutil.copy(parent / LEDGER_NAME, other)
    lines = (parent / LEDGER_NAME).read_bytes().splitlines(keepends=True)
    (parent / LEDGER_NAME).write_bytes(b"".join(lines[:5]))
    Ledger.fork(parent, child / "good", must_contain=head).close()
    with pytest.raises(LedgerError, match=f"{re.escape(str(parent))}.*does not contain the checkpoint's last entry"):
        Ledger.fork(parent, child, must_contain=later)
    (parent / LEDGER_NAME).write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(LedgerError, match=f"{re.escape(str(parent))}.* line 3 "):
        Ledger.fork(parent, child)
    (parent / LEDGER_NAME).unlink()
    with pytest.raises(LedgerError, match="missing"):
        Ledger.fork(parent, child)
    assert [path.name for path in child.iterdir()] == ["good"]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "link"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_fork_leaves_no_file_and_can_be_tried_again(folders, monkeypatch, call, error):
    parent, child, _ = folders

    def failing(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises((LedgerError, KeyboardInterrupt)):
            Ledger.fork(parent, child)
    assert list(child.iterdir()) == []
    with Ledger.fork(parent, child) as ledger:
        assert ledger.steps == 3


def test_a_folder_that_cannot_be_made_durable_leaves_no_file(folders, monkeypatch):
    parent, child, _ = folders
    with monkeypatch.context() as patch:
        patch.setattr(chained_log, "fsync_directory", fails(errno.EIO))
        with pytest.raises(LedgerError, match="durable"):
            Ledger.fork(parent, child)
    assert list(child.iterdir()) == []


def test_all_lines_are_on_disk_before_the_name_is(folders, monkeypatch):
    """fsync of the complete file, then its name, then fsync of the folder: a crash in between leaves no ledger."""
    parent, child, _ = folders
    calls = []
    for name in ("fsync", "link"):
        real = getattr(os, name)

        def recording(what, *rest, _name=name, _real=real):
            file = Path(os.path.realpath(f"/proc/self/fd/{what}")) if _name == "fsync" else Path(what)
            kind = "folder" if file.is_dir() else json.loads(file.read_bytes().splitlines()[-1])["type"]
            calls.append((_name, kind, (child / LEDGER_NAME).exists()))
            return _real(what, *rest)

        monkeypatch.setattr(os, name, recording)
    Ledger.fork(parent, child)
    assert calls == [("fsync", "fork", False), ("link", "fork", False), ("fsync", "folder", True)]


@pytest.mark.parametrize(
    "change",
    [{"parent": "r2"}, {"sequence": 1}, {"sequence": 4}, {"run": "r"}, {"run": "old"}, {"type": "amend", "meta": [1]}],
)
def test_entries_that_make_no_sense_are_refused(tmp_path, change):
    lines = [
        {"type": "ledger", "version": 1, "run": "old", "meta": {}},
        {"type": "fork", "run": "r", "parent": "old", "sequence": 0},
        {"type": "reserve", "sequence": 0, "count": 2, "event": EVENT},
        {"type": "fork", "run": "new", "parent": "r", "sequence": 2},
    ]
    forge(tmp_path / LEDGER_NAME, *lines)
    assert Ledger.open(tmp_path, read_only=True).parents == ["old", "r"]
    forge(tmp_path / LEDGER_NAME, *lines[:-1], lines[-1] | change)
    with pytest.raises(LedgerError, match="line 4 "):
        Ledger.open(tmp_path)
