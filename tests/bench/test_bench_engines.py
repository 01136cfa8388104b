"""`dprc bench step --strategy`: its figures, its errors in one line, and ranks that never outlive it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dprc_lightning.bench import ranks
from dprc_lightning.bench.ranks import run_ranks
from dprc_lightning.cli import main
from dprc_lightning.errors import BenchError

pytestmark = pytest.mark.timeout(300)
SMALL = "--tokens 16 --records 1 --rounds 1 --timeout 250".split()

RANK = """
import os, sys, time
from pathlib import Path
from dprc_lightning.bench.ranks import rank_main
from dprc_lightning.errors import ConfigurationError, RankZeroError

def run(spec, folder):
    rank = int(os.environ["LOCAL_RANK"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    print("a line of output")
    what = spec["what"]
    if what == "refused":
        raise ConfigurationError(["trainer.devices=2: no"]) if rank == 0 else RankZeroError("rank 0 stopped")
    if what == "broken" and rank == 1:
        raise RuntimeError("something broke")
    if what in ("hangs", "broken"):
        time.sleep(120)
    return {"rank": rank, "world": os.environ["WORLD_SIZE"], "slurm": os.environ.get("SLURM_PROCID")}

if __name__ == "__main__":
    rank_main(run)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a_rank.py").write_text(RANK)
    here = str(Path(ranks.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "code"), here]))

    def run(what: str, limit: float = 60.0):
        return run_ranks("a_rank", {"what": what}, 2, tmp_path, limit)

    return run


def alive(folder: Path) -> list[int]:
    """The ranks' processes that still run; one that is dead and not reaped does not."""
    found = []
    for file in folder.glob("pid*"):
        pid = file.read_text()
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout
        if state.strip() and not state.startswith("Z"):
            found.append(int(pid))
    return found


class TestRanks:
    def test_each_returns_what_it_found(self, job, monkeypatch):
        monkeypatch.setenv("SLURM_PROCID", "7")
        assert job("fine") == [{"rank": rank, "world": "2", "slurm": None} for rank in range(2)]

    def test_an_error_of_ours_is_told_as_it_is(self, job, tmp_path):
        with pytest.raises(BenchError, match=r"^trainer\.devices=2: no$"):
            job("refused")
        assert alive(tmp_path) == []

    def test_any_other_in_one_line_and_the_other_rank_does_not_wait(self, job, tmp_path, monkeypatch):
        monkeypatch.setattr(ranks, "GRACE", 0.5)
        with pytest.raises(BenchError, match="RuntimeError: something broke") as caught:
            job("broken")
        assert "\n" not in str(caught.value) and alive(tmp_path) == []

    def test_the_time_limit(self, job, tmp_path):
        with pytest.raises(BenchError, match=r"--timeout=15: the ranks did not end in time"):
            job("hangs", limit=15)
        assert len(list(tmp_path.glob("pid*"))) == 2 and alive(tmp_path) == []

    def test_a_launcher_that_is_killed_takes_its_ranks_along(self, job, tmp_path):
        code = (
            "from pathlib import Path; from dprc_lightning.bench.ranks import run_ranks; "
            f"run_ranks('a_rank', {{'what': 'hangs'}}, 2, Path({str(tmp_path)!r}), 100)"
        )
        launcher = subprocess.Popen([sys.executable, "-c", code])
        try:
            wait_for(lambda: len(alive(tmp_path)) == 2)
        finally:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
        wait_for(lambda: alive(tmp_path) == [])


def wait_for(what, limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class TestCommand:
    def test_figures(self, capsys):
        assert main(["bench", "step", "--strategy", "dprc_fsdp2", *SMALL, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        plain, private = found["rows"]
        assert (plain["step"], private["step"], plain["ratio"]) == ("non-private", "private", 1.0)
        # Four layers, and the root, which keeps its weights from forward to backward.
        assert (plain["gathers"], private["gathers"]) == (5 + 4, 5 + 4 + 4)
        assert private["phases"]["norm_pass"].keys() == {"all_gather"}
        assert plain["phases"]["clipped_backward"] == private["phases"]["clipped_backward"]
        assert plain["reduced_bytes"] == private["reduced_bytes"]
        assert 1 < plain["gathered_models"] < 2 < private["gathered_models"] < 3
        for row in found["rows"]:
            assert 0 < row["cpu_seconds_min"] <= row["cpu_seconds_median"]
        assert found["machine"]["accelerator"] in ("cpu", "gpu")

    def test_the_table(self, capsys):
        assert main(["bench", "step", "--strategy", "dprc_single", *SMALL]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["step", "phase", "collective", "calls", "MiB"]
        rows = {line.split()[0]: line.split() for line in lines if line.startswith(("non-private", "private"))}
        assert rows["non-private"][1:5] == rows["private"][1:5] == ["0", "0.00", "0", "0.00"]
        assert float(rows["private"][6]) > float(rows["non-private"][6]) == 1.0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--strategy", "dprc_nothing"], "--strategy='dprc_nothing': expected one of dprc_ddp"),
            (["--strategy", "dprc_single", "--devices", "2"], "--devices=2: strategy dprc_single runs one device"),
            (["--strategy", "dprc_ddp", "--devices", "0"], "--devices=0: expected an integer >= 1"),
            (["--strategy", "dprc_ddp", "--micro_batches", "0"], "--micro_batches=0: expected an integer >= 1"),
            (["--strategy", "dprc_ddp", "--sketch_dim", "2", "3"], "expected one integer with --strategy"),
            (["--strategy", "dprc_ddp", "--strategy_args", "[1]"], "--strategy_args='[1]': expected a JSON object"),
            (["--strategy", "dprc_ddp", "--timeout", "0"], "--timeout=0.0: expected seconds > 0"),
        ],
    )
    def test_refusals(self, capsys, arguments, message):
        assert main(["bench", "step", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1

    def test_a_refusal_by_the_strategy_comes_from_its_ranks(self, capsys):
        arguments = ["--strategy", "dprc_ddp", "--strategy_args", '{"static_graph": true}']
        assert main(["bench", "step", *arguments, *SMALL]) == 2
        assert "strategy dprc_ddp, static_graph=True: micro-batches of dummies" in capsys.readouterr().err
