import copy
import os
import pickle
import stat
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprc_lightning.errors import InvalidArgumentError, SecretError
from dprc_lightning.keys import SECRET_NAME, Domain, KeyStream, RunSecret, derive

ZERO = bytes(32)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_secret_survives_a_restart_and_is_private(tmp_path, umask):
    old = os.umask(umask)
    try:
        secret = RunSecret.create(tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / SECRET_NAME).stat().st_mode) == 0o600
    loaded = RunSecret.load(tmp_path)
    assert loaded.subkey(Domain.SAMPLING) == secret.subkey(Domain.SAMPLING)
    assert not secret.is_test and not loaded.is_test


def test_secrets_differ_between_runs(tmp_path):
    keys = set()
    for name in "abc":
        (tmp_path / name).mkdir()
        keys.add(RunSecret.create(tmp_path / name).subkey(Domain.PROJECTION))
    assert len(keys) == 3


def test_secret_is_never_replaced(tmp_path):
    RunSecret.create(tmp_path)
    before = (tmp_path / SECRET_NAME).read_bytes()
    with pytest.raises(SecretError, match="exists"):
        RunSecret.create(tmp_path)
    assert (tmp_path / SECRET_NAME).read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o644])
def test_secret_readable_by_others_is_refused(tmp_path, mode):
    RunSecret.create(tmp_path)
    (tmp_path / SECRET_NAME).chmod(mode)
    with pytest.raises(SecretError, match="chmod 600"):
        RunSecret.load(tmp_path)


def test_what_is_no_secret_is_refused(tmp_path):
    path = tmp_path / SECRET_NAME
    with pytest.raises(SecretError, match="missing"):
        RunSecret.load(tmp_path)
    for length in (0, 31, 33):
        path.write_bytes(bytes(length))
        path.chmod(0o600)
        with pytest.raises(SecretError, match=f"{length} bytes instead of 32"):
            RunSecret.load(tmp_path)
        path.unlink()
    other = tmp_path / "other"
    other.write_bytes(ZERO)
    other.chmod(0o600)
    path.symlink_to(other)
    with pytest.raises(SecretError, match="symbolic link"):
        RunSecret.load(tmp_path)
    with pytest.raises(SecretError, match="exists"):
        RunSecret.create(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(SecretError, match="regular file"):
        RunSecret.load(tmp_path)


def test_a_secret_that_cannot_be_stored_leaves_no_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SecretError, match="No space left"):
            RunSecret.create(tmp_path)
    assert list(tmp_path.iterdir()) == []
    RunSecret.create(tmp_path)
    with pytest.raises(SecretError, match="writable run folder"):
        RunSecret.create(tmp_path / "absent")


def test_secret_is_on_disk_with_its_name_before_create_returns(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recording(descriptor):
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    RunSecret.create(tmp_path)
    assert synced == [str(tmp_path / SECRET_NAME), str(tmp_path)]


@pytest.mark.parametrize("make", [lambda: RunSecret(b"0123456789abcdef" * 2), lambda: RunSecret.for_testing(1)])
def test_secret_shows_itself_nowhere(make):
    secret = make()
    assert not hasattr(secret, "__dict__")
    for text in (repr(secret), str(secret), f"{secret}"):
        assert "0123456789abcdef" not in text
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SecretError, match="cannot be pickled"):
            copied(secret)


def test_test_secret_is_marked():
    secret = RunSecret.for_testing(7)
    assert secret.is_test and "NOT PRIVATE" in repr(secret)
    assert secret.subkey(Domain.DROPOUT) == RunSecret.for_testing(7).subkey(Domain.DROPOUT)
    assert secret.subkey(Domain.DROPOUT) != RunSecret.for_testing(8).subkey(Domain.DROPOUT)


def test_domains_and_sequence_numbers_have_keys_of_their_own():
    secret = RunSecret.for_testing(0)
    keys = [secret.subkey(domain) for domain in Domain]
    keys += [secret.subkey(domain, n) for domain in Domain for n in range(50)]
    assert len(set(keys)) == len(keys)
    with pytest.raises(InvalidArgumentError, match="domain"):
        secret.subkey("sampling")


part = st.one_of(st.integers(-(2**80), 2**80), st.text(max_size=4), st.binary(max_size=4))


@given(st.lists(part, max_size=4), st.lists(part, max_size=4))
def test_derive_is_injective_in_its_parts(first, second):
    same = [(type(x), x) for x in first] == [(type(x), x) for x in second]
    assert (derive(ZERO, *first) == derive(ZERO, *second)) == same


def test_derive_tells_apart_what_concatenation_would_not():
    lists = [("a", "bc"), ("ab", "c"), ("abc",), (b"abc",), (1,), ("1",), (b"\x01",), (1, 0), (256,), (-1,), (255,), ()]
    assert len({derive(ZERO, *parts) for parts in lists}) == len(lists)


def test_derive_never_changes():
    # Another value means that every existing run folder would continue with other streams.
    assert derive(ZERO, "a", 1, b"\x00").hex() == "bdac216072e0b44e4a4cb2cfd7d2e335c0adaf2396f602e68369caef73c21b81"


@pytest.mark.parametrize("wrong", [True, 1.0, None, np.int64(1), ["a"]])
def test_derive_refuses_other_types(wrong):
    with pytest.raises(InvalidArgumentError, match="part"):
        derive(ZERO, wrong)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), "0" * 32, bytearray(32), None])
@pytest.mark.parametrize("use", [lambda key: derive(key, 1), KeyStream, RunSecret])
def test_wrong_keys_are_refused_without_being_shown(use, key):
    with pytest.raises(InvalidArgumentError, match="32 bytes") as caught:
        use(key)
    assert "000" not in str(caught.value)


def test_stream_is_chacha20():
    # RFC 8439, appendix A.1, test vectors 1 and 2.
    first = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert KeyStream(ZERO).bytes(32).hex() == first
    assert KeyStream(ZERO).bytes(72)[64:].hex() == "9f07e7be5551387a"


def test_stream_reads_on():
    whole = KeyStream(derive(ZERO, "x")).bytes(1000)
    stream = KeyStream(derive(ZERO, "x"))
    assert b"".join(stream.bytes(n) for n in (0, 1, 63, 64, 65, 807)) == whole
    words = KeyStream(derive(ZERO, "x")).uint64(125)
    assert words.dtype == np.uint64 and words.flags.writeable
    assert [int(word) for word in words[:3]] == [int.from_bytes(whole[8 * i : 8 * i + 8], "little") for i in range(3)]
    assert KeyStream(derive(ZERO, "y")).bytes(1000) != whole


def test_stream_ends_before_the_counter_wraps():
    stream = KeyStream(ZERO)
    stream._position = 2**38 - 8
    stream.uint64(1)
    with pytest.raises(InvalidArgumentError, match="one key per block"):
        stream.uint64(1)


def test_stream_is_not_copied():
    with pytest.raises(SecretError):
        pickle.dumps(KeyStream(ZERO))
    with pytest.raises(SecretError):
        copy.copy(KeyStream(ZERO))
    assert "hidden" in repr(KeyStream(ZERO))


def test_words_are_uniform():
    from scipy.stats import chisquare

    words = KeyStream(derive(ZERO, "uniform")).uint64(400_000)
    assert chisquare(np.bincount((words >> np.uint64(56)).astype(int), minlength=256)).pvalue > 1e-4
    assert chisquare(np.bincount((words & np.uint64(255)).astype(int), minlength=256)).pvalue > 1e-4


def test_keys_start_without_torch():
    code = "import sys, dprc_lightning.keys, dprc_lightning.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
