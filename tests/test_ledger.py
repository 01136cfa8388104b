import json
import os
from pathlib import Path

import pytest

from dprc_lightning.accounting import chained_log
from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger
from dprc_lightning.errors import InvalidArgumentError, LedgerError

EVENT = {"noise_multiplier": 1.25, "sample_rate": 0.05224, "sketch_dim": 32}
OTHER = {"noise_multiplier": 2.0, "sample_rate": 0.05224, "sketch_dim": None}
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


def test_what_is_written_is_read(tmp_path):
    ledger = Ledger.create(tmp_path, META)
    numbers = [ledger.reserve(EVENT).take() for _ in range(2)]
    group = ledger.reserve(OTHER, count=3)
    numbers += [group.take() for _ in range(3)]
    ledger.reserve(EVENT)
    assert numbers == [0, 1, 2, 3, 4]
    for reader in (ledger, Ledger.open(tmp_path, read_only=True), Ledger.open(ledger.path, read_only=True)):
        assert reader.spent() == [(EVENT, 2), (OTHER, 3), (EVENT, 1)]
        assert (reader.steps, reader.next_sequence, reader.meta, reader.run_id) == (6, 6, META, ledger.run_id)
        assert reader.head == ledger.head and reader.torn_bytes == 0
    assert ledger.writable and "steps=6" in repr(ledger)


def test_getters_change_nothing(run):
    with Ledger.open(run) as ledger:
        before = (run / LEDGER_NAME).read_bytes()
        spent = ledger.spent()
        spent[0][0]["noise_multiplier"] = 9.0
        spent.clear()
        assert ledger.spent() == [(EVENT, 3)] and ledger.steps == 3
    assert (run / LEDGER_NAME).read_bytes() == before


def test_reserve_is_on_disk_before_it_returns(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "pwrite"):
        real = getattr(os, name)

        def recording(descriptor, *rest, _name=name, _real=real):
            calls.append((_name, os.path.realpath(f"/proc/self/fd/{descriptor}")))
            return _real(descriptor, *rest)

        monkeypatch.setattr(os, name, recording)
    with Ledger.create(tmp_path, META) as ledger:
        file, folder = str(tmp_path / LEDGER_NAME), str(tmp_path)
        assert calls == [("pwrite", file), ("fsync", file), ("fsync", folder)]
        calls.clear()
        ledger.reserve(EVENT)
        assert calls == [("pwrite", file), ("fsync", file)]


def test_unclosed_reservation_counts_in_full(tmp_path):
    ledger = Ledger.create(tmp_path, META)
    assert ledger.reserve(EVENT, count=10).take() == 0
    ledger._log.release()  # as a crash would
    with Ledger.open(tmp_path) as ledger:
        assert ledger.steps == ledger.next_sequence == 10
        assert ledger.reserve(EVENT).take() == 10


def test_clean_stop_gives_back_what_was_not_begun(tmp_path):
    ledger = Ledger.create(tmp_path, META)
    reservation = ledger.reserve(EVENT, count=10)
    assert [reservation.take() for _ in range(4)] == [0, 1, 2, 3] and reservation.remaining == 6
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="is over"):
        reservation.take()
    with Ledger.open(tmp_path) as ledger:
        assert ledger.spent() == [(EVENT, 4)]
        assert ledger.reserve(EVENT, count=2).take() == 4  # as the uninterrupted run would have gone on
        ledger.close(used=2)
    assert Ledger.open(tmp_path, read_only=True).steps == 6


def test_close_cannot_count_less_than_was_begun(tmp_path):
    ledger = Ledger.create(tmp_path, META)
    with pytest.raises(InvalidArgumentError, match="used"):
        ledger.close(used=1)
    reservation = ledger.reserve(EVENT, count=3)
    reservation.take()
    for used in (0, 4, True, 1.0):
        with pytest.raises(InvalidArgumentError, match="used"):
            ledger.close(used=used)
    assert ledger.writable
    ledger.close(used=2)
    assert Ledger.open(tmp_path, read_only=True).steps == 2


def test_a_reservation_that_was_never_begun_leaves_nothing(tmp_path):
    with Ledger.create(tmp_path, META) as ledger:
        ledger.reserve(EVENT, count=5)
    ledger = Ledger.open(tmp_path, read_only=True)
    assert (ledger.spent(), ledger.steps, ledger.next_sequence) == ([], 0, 0)


def test_an_error_in_the_run_counts_in_full(tmp_path):
    with pytest.raises(RuntimeError), Ledger.create(tmp_path, META) as ledger:
        ledger.reserve(EVENT, count=5).take()
        raise RuntimeError
    assert Ledger.open(tmp_path, read_only=True).steps == 5


def test_reservation_ends(tmp_path):
    ledger = Ledger.create(tmp_path, META)
    first = ledger.reserve(EVENT)
    first.take()
    with pytest.raises(LedgerError, match="all 1 steps"):
        first.take()
    second = ledger.reserve(EVENT, count=2)
    third = ledger.reserve(EVENT)
    with pytest.raises(LedgerError, match="is over"):
        second.take()
    assert third.take() == 3 and ledger.steps == 4


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None])
def test_wrong_count_is_refused(tmp_path, count):
    ledger = Ledger.create(tmp_path, META)
    with pytest.raises(InvalidArgumentError, match="count"):
        ledger.reserve(EVENT, count=count)


@pytest.mark.parametrize("event", [{"sigma": float("nan")}, {"sigma": float("inf")}, {"x": object()}, [1], None])
def test_what_is_not_json_is_refused(tmp_path, event):
    with pytest.raises(InvalidArgumentError, match="meta"):
        Ledger.create(tmp_path, event)
    assert list(tmp_path.iterdir()) == []
    ledger = Ledger.create(tmp_path, META)
    with pytest.raises(InvalidArgumentError, match="event"):
        ledger.reserve(event)
    assert ledger.reserve(EVENT).take() == 0


# ------------------------------------------------------------------------------------------------------ damage


def test_any_edited_byte_is_found(run):
    data = (run / LEDGER_NAME).read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        (run / LEDGER_NAME).write_bytes(changed)
        if position == len(data) - 1:  # the last newline: now the last line is incomplete
            assert Ledger.open(run, read_only=True).torn_bytes > 0
            continue
        with pytest.raises(LedgerError, match=r"ledger\.jsonl line \d+ .*restore"):
            Ledger.open(run, read_only=True)


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda x: [*x[:2], x[2].replace(b"1.25", b"9.25"), *x[3:]], 3),
        (lambda x: [*x[:2], *x[3:]], 3),  # removed
        (lambda x: x[1:], 1),  # header removed
        (lambda x: [x[0], x[2], x[1], *x[3:]], 2),  # reordered
        (lambda x: [*x[:2], x[1], *x[2:]], 3),  # repeated
        (lambda x: [*x[:2], b"\n", *x[2:]], 3),
        (lambda x: [*x, b"garbage\n"], 6),
        (lambda x: [*x[:1], b"\0" * 300 + b"\n"], 2),
    ],
)
def test_damage_names_file_line_and_remedy(run, change, number):
    (run / LEDGER_NAME).write_bytes(b"".join(change(lines(run))))
    for read_only in (True, False):
        with pytest.raises(LedgerError, match=rf"{LEDGER_NAME} line {number} .*restore the file from a copy"):
            Ledger.open(run, read_only=read_only)


def test_every_line_depends_on_all_before(run):
    with Ledger.open(run) as ledger:
        ledger.reserve(EVENT).take()
    full = lines(run)
    assert json.loads(full[4])["type"] == "close"  # says nothing: all was used; yet its absence shows
    (run / LEDGER_NAME).write_bytes(b"".join([*full[:4], *full[5:]]))
    with pytest.raises(LedgerError, match="line 5 "):
        Ledger.open(run)


def forge(path: Path, *entries: dict) -> None:
    path.unlink(missing_ok=True)
    log = chained_log.ChainedLog.create(path, entries[0])
    log.append(entries[1:])
    log.release()


@pytest.mark.parametrize(
    ("number", "entry"),
    [
        (1, {"type": "ledger", "version": 2, "run": "r", "meta": {}}),
        (1, {"type": "reserve", "sequence": 0, "count": 1, "event": EVENT}),
        (2, {"type": "ledger", "version": 1, "run": "r", "meta": {}}),
        (2, {"type": "reserve", "sequence": 1, "count": 1, "event": EVENT}),
        (2, {"type": "reserve", "sequence": 0, "count": 0, "event": EVENT}),
        (2, {"type": "close", "sequence": 0, "used": 0}),
        (2, {"type": "refund"}),
        (2, {"no": "type"}),
    ],
)
def test_entries_that_make_no_sense_are_refused(tmp_path, number, entry):
    header = {"type": "ledger", "version": 1, "run": "r", "meta": {}}
    forge(tmp_path / LEDGER_NAME, *([entry, entry] if number == 1 else [header, entry]))
    with pytest.raises(LedgerError, match=f"line {number} "):
        Ledger.open(tmp_path)


@pytest.mark.parametrize("used", [-1, 3])
def test_close_entry_must_fit(tmp_path, used):
    header = {"type": "ledger", "version": 1, "run": "r", "meta": {}}
    reserve = {"type": "reserve", "sequence": 0, "count": 2, "event": EVENT}
    forge(tmp_path / LEDGER_NAME, header, reserve, {"type": "close", "sequence": 0, "used": used})
    with pytest.raises(LedgerError, match="line 3 "):
        Ledger.open(tmp_path)
    good = {"type": "close", "sequence": 0, "used": 1}
    forge(tmp_path / LEDGER_NAME, header, reserve, good, good)
    with pytest.raises(LedgerError, match="line 4 "):
        Ledger.open(tmp_path)


def test_missing_and_existing_files(tmp_path):
    with pytest.raises(LedgerError, match="missing"):
        Ledger.open(tmp_path)
    with pytest.raises(LedgerError, match="writable run folder"):
        Ledger.create(tmp_path / "absent" / LEDGER_NAME, META)
    (tmp_path / LEDGER_NAME).write_bytes(b'{"type":"led')
    with pytest.raises(LedgerError, match="no complete first line"):
        Ledger.open(tmp_path)
    (tmp_path / LEDGER_NAME).unlink()
    Ledger.create(tmp_path, META).close()
    with pytest.raises(LedgerError, match="exists"):
        Ledger.create(tmp_path, META)


def test_a_torn_line_never_began_and_is_cut_off_at_the_next_append(run):
    whole = lines(run)
    complete = b"".join(whole[:-2])  # without the last reservation and the closing entry
    for length in range(1, len(whole[-2])):
        torn = complete + whole[-2][:length]
        (run / LEDGER_NAME).write_bytes(torn)
        with Ledger.open(run) as ledger:
            assert (ledger.steps, ledger.torn_bytes) == (2, length)
        assert (run / LEDGER_NAME).read_bytes() == torn  # opening and closing changes nothing
        if length % 40 == 1:
            with Ledger.open(run) as ledger:
                assert ledger.reserve(EVENT).take() == 2
                assert ledger.torn_bytes == 0
            again = Ledger.open(run, read_only=True)
            assert (again.steps, again.torn_bytes) == (3, 0)
            note = json.loads(lines(run)[3])
            assert (note["type"], note["bytes"]) == ("torn", length)


def test_a_ledger_shorter_than_the_checkpoint_is_refused(run):
    with Ledger.open(run) as ledger:
        ledger.reserve(EVENT).take()
        head = ledger.head
        ledger.reserve(EVENT).take()
    Ledger.open(run, must_contain=head).close()
    full = lines(run)
    # Cut at the end of a line, which the chain alone cannot see.
    (run / LEDGER_NAME).write_bytes(b"".join(full[:4]))
    assert Ledger.open(run, read_only=True).steps == 3
    with pytest.raises(LedgerError, match="does not contain the checkpoint's last entry"):
        Ledger.open(run, must_contain=head)
    Ledger.open(run).close()  # the refusal kept no lock
