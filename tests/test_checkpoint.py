"""Kills, full disks and hostile files: the last good checkpoint stays, and no file runs code."""

import errno
import os
import pickle
import random
import resource
import signal
import stat
import time
import traceback
import zipfile
from pathlib import Path

import pytest
import torch
import toy
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim import lr_scheduler

from dprc_lightning import PrivacyConfig
from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.errors import CheckpointError, InvalidArgumentError
from dprc_lightning.strategies import PrivateSingleDeviceStrategy

IO = DurableCheckpointIO()


def state(version: int, size: int = 1000) -> dict:
    """Every entry tells the version: a mixture of two would be seen."""
    return {"version": version, "state_dict": {str(i): torch.full((size,), float(version)) for i in range(4)}}


def is_complete(checkpoint: dict) -> bool:
    return all((t == checkpoint["version"]).all() and len(t) for t in checkpoint["state_dict"].values())


@pytest.fixture
def file(tmp_path) -> Path:
    """A folder with one good checkpoint, version 1."""
    path = tmp_path / "checkpoints" / "epoch=0-step=1.ckpt"
    IO.save_checkpoint(state(1), path)
    return path


def only(file: Path) -> bool:
    return list(file.parent.iterdir()) == [file]


def test_what_is_saved_is_loaded_and_replaced(file):
    assert is_complete(IO.load_checkpoint(file)) and IO.load_checkpoint(str(file), weights_only=True)["version"] == 1
    IO.save_checkpoint(state(2), str(file))
    assert IO.load_checkpoint(file)["version"] == 2 and only(file)
    moved = IO.load_checkpoint(file, map_location="meta")["state_dict"]["0"]
    assert moved.device.type == "meta"
    IO.remove_checkpoint(file)
    assert not file.exists()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_is_what_the_umask_says(file, umask):
    before = os.umask(umask)
    try:
        IO.save_checkpoint(state(2), file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def test_the_data_is_on_disk_before_the_name_and_the_name_before_the_return(file, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def noting(descriptor):
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    IO.save_checkpoint(state(2), file)
    assert calls == ["file", "replace", "folder"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), SystemExit(143)]
)
@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_failure_at_any_call_leaves_the_last_good_one(file, monkeypatch, call, error):
    def failing(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        expected = CheckpointError if isinstance(error, OSError) else type(error)
        with pytest.raises(expected) as caught:
            IO.save_checkpoint(state(2), file)
    if isinstance(error, OSError):
        assert str(file) in str(caught.value) and "No space left" in str(caught.value) and "resume" in str(caught.value)
    assert IO.load_checkpoint(file)["version"] == 1 and only(file)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", range(8))
def test_an_interrupted_write_is_told_as_what_it_was(file, monkeypatch, error, call):
    """Torch's writer hides what interrupted it behind a RuntimeError of its own."""
    fdopen = os.fdopen

    def opening(*arguments):
        stream = fdopen(*arguments, 0)
        calls = []

        class Failing:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                stream.close()

            def __getattr__(self, name):
                return getattr(stream, name)

            def write(self, data):
                calls.append(len(data))
                if len(calls) > call:
                    raise error
                return stream.write(data)

        return Failing()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", opening)
        with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
            IO.save_checkpoint(state(2), file)
    assert IO.load_checkpoint(file)["version"] == 1 and only(file)


def test_an_error_that_was_there_before_is_not_taken_for_the_cause(file):
    """Lightning saves on an exception: while a Ctrl-C is being handled, say."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match="of my own"):
            IO.save_checkpoint({"x": Unpicklable()}, file)
    assert only(file)


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("of my own")


def fork(work) -> tuple[int, int]:
    """Run ``work(descriptor)`` in a child: its process id, and where its output can be read."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # a pool of threads does not survive a fork
            work(write)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    return child, read


def output(child: int, read: int) -> str:
    with os.fdopen(read) as stream:
        said = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("limit", [0, 100, 100_000])
def test_a_real_file_size_limit(file, limit):
    def full(write):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"cannot be written \(File too large\)"):
                IO.save_checkpoint({"x": torch.zeros(100_000)}, file)

    output(*fork(full))
    assert IO.load_checkpoint(file)["version"] == 1 and only(file)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_the_write_is_not_buffered_in_memory(file):
    """A copy of the checkpoint in memory is what a full machine would die of."""

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def big(write):
        checkpoint = {"x": torch.ones(50_000_000)}
        before = peak()
        IO.save_checkpoint(checkpoint, file)
        os.write(write, b"%d" % (peak() - before))

    assert int(output(*fork(big))) < 50_000, "KiB; the tensor has 195,000"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_kill_9_in_the_middle_of_saves(file):
    rng, version, leftovers = random.Random(0), 1, 0

    def save_for_ever(write):
        number = version
        while True:
            number += 1
            IO.save_checkpoint(state(number, size=200_000), file)

    for _ in range(10):
        child, read = fork(save_for_ever)
        # Killed while a temporary file is there, that is within a save, at any of its moments.
        deadline = time.monotonic() + 20
        while not list(file.parent.glob(".*.tmp")) and time.monotonic() < deadline:
            pass
        time.sleep(rng.uniform(0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        found = IO.load_checkpoint(file)
        assert is_complete(found) and found["version"] >= version
        version = found["version"]
        leftover = [path for path in file.parent.iterdir() if path != file]
        assert len(leftover) <= 1, "a save left more than its own"
        leftovers += len(leftover)
        assert not any("ckpt" in path.name for path in leftover), "Lightning would take it for a checkpoint"
    assert leftovers >= 3, "no kill hit a save"
    IO.save_checkpoint(state(version + 1), file)
    assert only(file)


def test_leftovers_of_other_names_stay(file):
    other = file.parent / ".epoch=0-step=11.partial.00000000.tmp"
    other.touch()
    (file.parent / ".epoch=0-step=1.partial.00000000.tmp").touch()
    IO.save_checkpoint(state(2), file)
    assert sorted(file.parent.iterdir()) == sorted([file, other])


# Loading ------------------------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def test_a_malicious_pickle_is_named_and_not_run(file, tmp_path):
    marker = tmp_path / "was run"
    with pytest.raises(CheckpointError, match=r"could not be loaded again: it holds posix\.mkdir.*add_safe_globals"):
        IO.save_checkpoint({"x": Malicious(marker)}, file)
    assert IO.load_checkpoint(file)["version"] == 1 and only(file)
    torch.save({"x": Malicious(marker)}, file)
    with pytest.raises(CheckpointError, match=r"step=1\.ckpt is not loaded: it holds posix\.mkdir") as caught:
        IO.load_checkpoint(file)
    assert "\n" not in str(caught.value)
    # The scan goes by names. If it saw nothing, the unpickler must still refuse.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dprc_lightning.checkpoint.get_unsafe_globals_in_checkpoint", lambda _: [])
        with pytest.raises(CheckpointError, match="malformed"):
            IO.load_checkpoint(file)
    assert not marker.exists()
    torch.load(file, weights_only=False)
    assert marker.exists(), "the pickle is harmless: this test proves nothing"


def test_a_bare_pickle_is_not_run(file, tmp_path):
    file.write_bytes(pickle.dumps(Malicious(tmp_path / "was run")))
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        IO.load_checkpoint(file)
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("value", [False, 0])
def test_weights_only_cannot_be_turned_off(file, value):
    with pytest.raises(InvalidArgumentError, match="weights_only=.*leave it out"):
        IO.load_checkpoint(file, weights_only=value)


def test_every_truncation_is_told_with_the_other_checkpoints(file):
    older = file.parent / "epoch=0-step=0.ckpt"
    IO.save_checkpoint(state(0), older)
    os.utime(older, (1, 1))
    (file.parent / "last.ckpt").symlink_to(older.name)
    whole = file.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated or damaged, use an earlier one") as caught:
            IO.load_checkpoint(file)
        assert str(caught.value).endswith("has epoch=0-step=0.ckpt")
        assert "\n" not in str(caught.value)
    assert IO.load_checkpoint(file.parent / "last.ckpt")["version"] == 0


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_is_seen(file, checksums):
    """Torch itself loads it without a word. A process that writes no checksums still writes them here."""
    torch.serialization.set_crc32_options(checksums)
    try:
        IO.save_checkpoint(state(1), file)
        assert torch.serialization.get_crc32_options() is checksums
    finally:
        torch.serialization.set_crc32_options(True)
    whole = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        (data,) = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    whole[data.header_offset + 2000] ^= 1
    assert is_complete(IO.load_checkpoint(file))
    file.write_bytes(whole)
    assert not is_complete(torch.load(file, weights_only=True))
    with pytest.raises(CheckpointError, match="damaged, use an earlier one: .* has no other checkpoint"):
        IO.load_checkpoint(file)


def test_missing_files_and_other_things(file, tmp_path):
    with pytest.raises(CheckpointError, match=r"epoch=9.ckpt is missing: .*checkpoints has epoch=0-step=1.ckpt"):
        IO.load_checkpoint(file.parent / "epoch=9.ckpt")
    with pytest.raises(CheckpointError, match="is missing: there is no folder"):
        IO.load_checkpoint(tmp_path / "nowhere" / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\)"):
        IO.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Is a directory\)"):
        IO.save_checkpoint(state(1), tmp_path / "checkpoints")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x", "no checkpoint")
    with pytest.raises(CheckpointError, match="no checkpoint of torch"):
        IO.load_checkpoint(file)


def test_only_local_files(file):
    for use in (IO.load_checkpoint, lambda path: IO.save_checkpoint({}, path)):
        with pytest.raises(InvalidArgumentError, match="s3://bucket/x.ckpt.*local"):
            use("s3://bucket/x.ckpt")
    with pytest.raises(InvalidArgumentError, match="storage_options=.*leave it out"):
        IO.save_checkpoint(state(2), file, storage_options={"key": 1})
    assert IO.load_checkpoint(file)["version"] == 1


# Under Lightning ----------------------------------------------------------------------------------------------------


class Saved(toy.ToyModule):
    """Keeps its hyper-parameters, of the kinds that people have."""

    def __init__(self, privacy, performance=None, folder=Path("x"), dtype=torch.bfloat16, betas=(0.9, 0.99)):
        super().__init__(privacy, performance)
        self.save_hyperparameters()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        parts = [
            lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
            lr_scheduler.MultiStepLR(optimizer, [1, 3]),
            lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        ]
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.SequentialLR(optimizer, parts, [1, 2])}


# A run whose last steps are lost can make them again.
PRIVACY = toy.privacy(steps=8, crash_allowance=4)


def fit(folder: Path, resume: Path | None = None) -> Saved:
    callbacks = [
        ModelCheckpoint(folder / "checkpoints", save_top_k=-1, monitor="val/accuracy", save_last="link"),
        # Strict, it would end a resume: Lightning closes the checkpoint's epoch again, without its metrics.
        EarlyStopping("val/accuracy", patience=9, strict=False),
    ]
    module = Saved(PRIVACY)
    trainer = toy.trainer(
        folder,
        strategy=PrivateSingleDeviceStrategy(checkpoint_io=DurableCheckpointIO()),
        callbacks=callbacks,
        enable_checkpointing=True,
        limit_val_batches=1.0,
    )
    trainer.fit(module, datamodule=toy.ToyData(), ckpt_path=resume)
    return module


@pytest.mark.filterwarnings("ignore")
def test_all_that_lightning_puts_into_a_checkpoint_comes_back(tmp_path):
    fit(tmp_path)
    files = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in files] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    for path in files:
        found = IO.load_checkpoint(path)
        assert {"state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers", "dprc_lightning"} <= set(found)
        assert found["hyper_parameters"]["privacy"] == PRIVACY
        assert isinstance(found["hyper_parameters"]["privacy"], PrivacyConfig)
    # Lightning's own readers are weights_only too, and must know the same classes.
    again = Saved.load_from_checkpoint(files[0], weights_only=True)
    assert again.hparams["folder"] == Path("x") and again.privacy.steps == 8


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_from_such_a_file_and_is_told_of_a_damaged_one(tmp_path):
    fit(tmp_path)
    first, second, _ = sorted((tmp_path / "checkpoints").iterdir())
    assert fit(tmp_path, first).batch_sizes, "it made steps again"
    os.truncate(first, 1000)
    with pytest.raises(CheckpointError, match=rf"truncated or damaged.*{second.name}"):
        fit(tmp_path, first)
