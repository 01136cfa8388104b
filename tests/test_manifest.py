"""The manifest of a checkpoint folder: no change goes unseen, and without the key nobody can write one."""

import json
import os
import re
import shutil

import pytest
from toy import ToyData, ToyModule, ZeroNoise, privacy, trainer

from dprc_lightning import manifest
from dprc_lightning.accounting import Ledger
from dprc_lightning.errors import CheckpointError
from dprc_lightning.keys import Domain, RunSecret
from dprc_lightning.run import identity_of, stored_secret

KEY, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "x.ckpt"
    (path / "inner").mkdir(parents=True)
    (path / "a.pt").write_bytes(b"weights")
    (path / "inner" / "b.pt").write_bytes(b"states")
    sign(path)
    return path


def sign(path, key=KEY):
    manifest.sign(path, {name: manifest.digest(path / name, durable=True) for name in manifest.files_of(path)}, key)


def check(path, *keys):
    content = manifest.check_signature(path, keys or [OTHER, KEY])
    manifest.check_files(path, content, sorted(content["files"]))


def refused(path, *keys):
    with pytest.raises(CheckpointError) as caught:
        check(path, *keys)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_what_was_signed_is_accepted(folder):
    assert manifest.files_of(folder) == ["a.pt", "inner/b.pt"]
    check(folder)
    # Wherever it lies.
    check(folder.rename(folder.with_name("y.ckpt")))


def test_a_change_is_seen(folder):
    (folder / "inner" / "b.pt").write_bytes(b"State!")
    assert "inner/b.pt is damaged or was changed" in refused(folder)


@pytest.mark.parametrize("name", ["c.pt", "inner/c.pt", "inner/manifest.json", ".hidden", "new/c.pt"])
def test_another_file_is_seen(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    assert f"{name} is not of it" in refused(folder)


def test_a_missing_file_is_seen(folder):
    (folder / "a.pt").unlink()
    assert "a.pt is missing" in refused(folder)


def test_a_file_under_another_name_is_seen(folder):
    os.rename(folder / "a.pt", folder / "c.pt")
    assert "a.pt is missing" in refused(folder)


def test_contents_that_change_places_are_seen(folder):
    one, other = folder / "a.pt", folder / "inner" / "b.pt"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert "a.pt is damaged or was changed" in refused(folder)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_link_is_seen(folder, tmp_path, is_folder):
    """Also one to the very same content: what it points to can change between look and use."""
    real = tmp_path / "elsewhere"
    place = folder / "inner" if is_folder else folder / "a.pt"
    os.rename(place, real)
    place.symlink_to(real)
    assert "is a link" in refused(folder)


def test_a_manifest_of_another_key_is_refused(folder):
    assert "secret did not sign it" in refused(folder, OTHER)
    with pytest.raises(CheckpointError, match="secret did not sign it"):
        manifest.check_signature(folder, [])


def test_digests_that_were_changed_along_with_the_file_are_refused(folder):
    (folder / "a.pt").write_bytes(b"code")
    path = folder / manifest.MANIFEST
    content = json.loads(path.read_text())
    content["files"]["a.pt"] = manifest.digest(folder / "a.pt")
    path.write_text(json.dumps(content))
    assert "secret did not sign it" in refused(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "has no manifest.json"),
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("7", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"version": 1}', "cannot be read"),
        ('{"version": 2, "files": {}, "mac": ""}', "of another format"),
        ('{"version": 1, "files": [], "mac": ""}', "of another format"),
        ('{"version": 1, "files": {}}', "of another format"),
        ('{"version": 1, "files": {}, "mac": null}', "secret did not sign it"),
        ('{"version": 1, "files": {}, "mac": "\\u00e9"}', "secret did not sign it"),
    ],
)
def test_a_damaged_manifest_is_told(folder, text, says):
    path = folder / manifest.MANIFEST
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert re.search(says, refused(folder))


def test_bytes_that_are_no_text(folder):
    (folder / manifest.MANIFEST).write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(folder)


def test_what_it_leaves_out_is_nothing(folder):
    """Every file of the folder but the manifest is in it, and both are on disk under the key alone."""
    content = json.loads((folder / manifest.MANIFEST).read_text())
    assert set(content["files"]) == {"a.pt", "inner/b.pt"}
    assert KEY.hex() not in (folder / manifest.MANIFEST).read_text()


class TestTheKeyOfACheckpoint:
    """It is derived from the secret that lies in the run folder, if the run itself put it there."""

    def run(self, folder):
        folder.mkdir()
        secret = RunSecret.create(folder)
        with Ledger.create(folder / "ledger.jsonl", {}) as ledger:
            ledger.amend({"files": identity_of(folder)})
        return secret

    def test_of_the_run_itself(self, tmp_path):
        secret = self.run(tmp_path / "run")
        found = stored_secret(tmp_path / "run")
        assert found is not None and found.subkey(Domain.CHECKPOINT) == secret.subkey(Domain.CHECKPOINT)
        # Renamed, it is still the same files.
        os.rename(tmp_path / "run", tmp_path / "moved")
        assert stored_secret(tmp_path / "moved") is not None

    def test_of_a_copy_there_is_none(self, tmp_path):
        """Whoever can make a copy can put a secret of their own into it."""
        self.run(tmp_path / "run")
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert stored_secret(tmp_path / "copy") is None

    def test_of_a_secret_that_was_put_there_there_is_none(self, tmp_path):
        self.run(tmp_path / "run")
        self.run(tmp_path / "other")
        os.replace(tmp_path / "other" / "secret.key", tmp_path / "run" / "secret.key")
        assert stored_secret(tmp_path / "run") is None

    @pytest.mark.parametrize("name", ["secret.key", "ledger.jsonl"])
    def test_of_half_a_run_there_is_none(self, tmp_path, name):
        self.run(tmp_path / "run")
        (tmp_path / "run" / name).unlink()
        assert stored_secret(tmp_path / "run") is None


def test_a_pipe_is_no_file_of_a_checkpoint(tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"x")
    assert manifest.files_of(tmp_path) == ["weights.pt"]
    os.mkfifo(tmp_path / "more.pt")
    with pytest.raises(CheckpointError, match="is no file, and a checkpoint holds files alone"):
        manifest.files_of(tmp_path)


def test_a_secret_of_another_user_vouches_for_nothing(tmp_path, monkeypatch):
    """Whoever made it could have signed whatever lies beside it."""
    trainer(tmp_path, ZeroNoise()).fit(ToyModule(privacy()), datamodule=ToyData())
    assert stored_secret(tmp_path) is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert stored_secret(tmp_path) is None
