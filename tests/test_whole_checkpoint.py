"""A checkpoint of any engine as one dictionary; and parameters of which one process holds a part."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from toy import ToyData, ToyModule, checkpointing, privacy, trainer

from dprc_lightning import manifest
from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.clipping import attach
from dprc_lightning.errors import CheckpointError
from dprc_lightning.keys import Domain, RunSecret
from dprc_lightning.layers.rule import INSTRUMENTED
from dprc_lightning.shards import local_part, version
from dprc_lightning.whole_checkpoint import REST, load_whole, whole_weights

pytestmark = pytest.mark.filterwarnings("ignore")


class Touches:
    """Unpickled, it leaves a file, and is what another pickle holds."""

    def __init__(self, marker: Path, then: bytes) -> None:
        self.code = f"(__import__('pathlib').Path({str(marker)!r}).touch(), __import__('pickle').loads({then!r}))[1]"

    def __reduce__(self):
        return eval, (self.code,)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def run(tmp_path):
    """A private run with one checkpoint, a file; and a folder of the same, as FSDP2 writes it, signed."""
    folder = tmp_path / "run"
    module = ToyModule(privacy(steps=1))
    trainer(folder, **checkpointing(folder)).fit(module, datamodule=ToyData())
    file = folder / "checkpoints" / "step=1.ckpt"
    content = torch.load(file, weights_only=True)
    shards = folder / "checkpoints" / "shards.ckpt"
    dcp.save({"state_dict": content["state_dict"]}, checkpoint_id=shards, no_dist=True)
    rest = {key: value for key, value in content.items() if key not in {"state_dict", "optimizer_states"}}
    DurableCheckpointIO().save_checkpoint(rest, shards / REST)
    sign(shards, RunSecret.load(folder).subkey(Domain.CHECKPOINT))
    return folder, content


def sign(path, key):
    manifest.sign(path, {name: manifest.digest(path / name) for name in manifest.files_of(path)}, key)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class TestLoadWhole:
    def test_a_file(self, run):
        folder, content = run
        found = load_whole(folder / "checkpoints" / "step=1.ckpt")
        assert equal(found["state_dict"], content["state_dict"]) and "optimizer_states" in found

    def test_a_folder(self, run):
        folder, content = run
        found = load_whole(folder / "checkpoints" / "shards.ckpt")
        assert equal(found["state_dict"], content["state_dict"])
        assert found["dprc_lightning"] == content["dprc_lightning"] and "optimizer_states" not in found

    @pytest.mark.parametrize("signed", [False, True])
    def test_what_the_run_did_not_sign_is_not_unpickled(self, run, tmp_path, signed):
        folder, content = run
        path, marker = folder / "checkpoints" / "shards.ckpt", tmp_path / "ran"
        file = path / ".metadata"
        file.write_bytes(pickle.dumps(Touches(marker, file.read_bytes())))
        if signed:
            sign(path, bytes(32))
        with pytest.raises(CheckpointError, match="--trust_checkpoint" if signed else "damaged or was changed"):
            load_whole(path)
        assert not marker.exists()
        # It is live: whoever trusts it runs it.
        assert equal(load_whole(path, trust=True)["state_dict"], content["state_dict"]) and marker.exists()

    def test_a_folder_in_no_run_needs_trust(self, run, tmp_path):
        folder, content = run
        path = (folder / "checkpoints" / "shards.ckpt").rename(tmp_path / "shards.ckpt")
        with pytest.raises(CheckpointError, match="secret did not sign it"):
            load_whole(path)
        assert equal(load_whole(path, trust=True)["state_dict"], content["state_dict"])

    def test_a_folder_without_weights(self, tmp_path):
        with pytest.raises(CheckpointError, match="no weights of a known engine"):
            whole_weights(tmp_path)

    def test_a_strategy_of_one_process_says_who_can_load_it(self, run):
        folder, _ = run
        path = folder / "checkpoints" / "shards.ckpt"
        with pytest.raises(CheckpointError, match="load it with that one"):
            trainer(folder).test(ToyModule(privacy()), datamodule=ToyData(), ckpt_path=path)


class TestShards:
    def test_the_part_of_a_sharded_tensor_is_itself(self, one_rank):
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.arange(6.0).reshape(3, 2)
        for placement in (Shard(0), Replicate()):
            sharded = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]))
            part = local_part(sharded)
            assert type(part) is torch.Tensor and not part.requires_grad and torch.equal(part, whole)
            before = version(sharded)
            part.add_(1)
            assert torch.equal(sharded.full_tensor(), whole + 1), "no copy"
            assert version(sharded) == before + 1

    def test_an_ordinary_one_is_left_alone(self):
        tensor = torch.zeros(3, requires_grad=True)
        assert local_part(tensor) is tensor
        before = version(tensor)
        with torch.no_grad():
            tensor.add_(1)
        assert version(tensor) == before + 1


class TestClassesUnderAnEngine:
    """Detached, a module has the class that it would have had without us; an engine may have made one of ours."""

    def model(self):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    def instrumented(self, module):
        return any(INSTRUMENTED in cls.__dict__ for cls in type(module).__mro__)

    def test_without_an_engine(self):
        model = self.model()
        handle = attach(model, estimator="exact")
        assert self.instrumented(model[0])
        handle.detach()
        assert type(model[0]) is torch.nn.Linear

    def test_sharded_after_it_was_instrumented(self, one_rank):
        model, plain = self.model(), self.model()
        handle = attach(model, estimator="exact")
        fully_shard(model[0])
        assert self.instrumented(model[0])
        handle.detach()
        fully_shard(plain[0])
        assert not self.instrumented(model[0])
        assert [cls.__name__ for cls in type(model[0]).__mro__] == [cls.__name__ for cls in type(plain[0]).__mro__]
        assert isinstance(model[0], torch.nn.Linear)
        # FSDP goes on: its methods and its state are there.
        model[0].reshard()
        x = torch.ones(2, 3)
        assert torch.equal(model(x), plain(x))
