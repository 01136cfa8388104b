"""The report: its numbers against other accountants, and that it can be made whatever became of the run."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from dp_accounting.pld import privacy_loss_distribution
from toy import ToyData, ToyModule, ZeroNoise, checkpointing, privacy, trainer

from dprc_lightning.accounting import Accountant, Ledger, StepEvent, epsilon
from dprc_lightning.cli import main
from dprc_lightning.errors import DPRCError, ReportError
from dprc_lightning.report import assemble, read_report, to_html, to_markdown, write_report
from dprc_lightning.report.bounds import bounds, larger_sketch_dims, other_deltas
from dprc_lightning.report.sections import grouped, number

pytestmark = pytest.mark.filterwarnings("ignore")


def event(**changes):
    return StepEvent(**({"noise_multiplier": 1.0, "sample_rate": 0.1} | changes)).to_dict()


def start(**changes):
    mechanism = {
        "noise_multiplier": 1.0, "max_grad_norm": 0.5, "sample_rate": 0.1, "steps": 20, "crash_allowance": 3,
        "delta": 1e-4, "num_records": 1000, "group_column": None, "expected_batch_size": 100.0, "estimator": "exact",
        "sketch_dim": None, "projection": "gaussian", "norm_slack": 0.0, "bound": "best", "target_epsilon": None,
        "private": True,
    }  # fmt: skip
    facts = {
        "name": "a run", "not_private_because": None, "on_nonfinite": "raise", "precision": "32-true", "parameters": [],
        "data": {}, "logged_unprotected": ["train/loss"], "paths": {"run folder": "here"}, "versions": {"torch": "2"},
    }  # fmt: skip
    return facts | {"mechanism": mechanism | changes.pop("mechanism", {})} | changes


class TestBounds:
    def test_every_delta_against_another_accountant(self):
        found = bounds([(event(), 20)], 1e-4, 1000)
        pld = privacy_loss_distribution.from_gaussian_mechanism(1.0, sampling_prob=0.1).self_compose(20)
        for row in [*found["epsilon_at"], found["epsilon"]]:
            expected = pld.get_epsilon_for_delta(row["delta"])
            # Theirs is a bound as well, from above; ours may lie on either side of it by the grid's width.
            assert row["upper"] == pytest.approx(expected, rel=2e-3), row
            assert 0.99 * expected < row["lower"] <= row["estimate"] <= row["upper"], row
        assert [row["delta"] for row in found["epsilon_at"]] == [1e-5, 1e-6]

    def test_directions(self):
        found = bounds([(event(), 20)], 1e-4, 1000)
        directions = found["directions"]
        assert directions["dominates"] == "remove" and directions["add"] < directions["remove"]
        assert directions["remove"] == found["epsilon"]["upper"]

    def test_a_larger_k_buys_what_the_accountant_says(self):
        sketched, exact = StepEvent(1.0, 0.1, sketch_dim=16), StepEvent(2.0, 0.1)
        rows = larger_sketch_dims(((sketched, 20), (exact, 5)), 1e-4)
        assert [row["sketch_dim"] for row in rows] == [32, 64, None]
        for row in rows[::2]:
            history = [(replace(sketched, sketch_dim=row["sketch_dim"]), 20), (exact, 5)]
            assert row["upper"] == pytest.approx(Accountant(history).upper(1e-4), rel=1e-6)
        uppers = [row["upper"] for row in rows]
        assert uppers == sorted(uppers, reverse=True)
        assert larger_sketch_dims(((exact, 5),), 1e-4) == [], "exact already"

    def test_figures_that_come_later_cost_nothing_more(self):
        first = bounds([(event(), 20)], 1e-4, 1000)
        began = time.process_time()
        assert bounds([(event(), 20)], 1e-4, 1000) == first
        assert time.process_time() - began < 0.05

    def test_other_deltas_stay_below_one_over_n(self):
        assert other_deltas(1e-5, 1500) == [1e-4, 1e-6, 1e-7]
        assert other_deltas(1e-3, 1000) == [1e-4, 1e-5]
        assert other_deltas(2e-6, 10**5) == [1e-6, 2e-7, 2e-8]
        for n in (1, 7, 10, 99, 1000, 12345):
            assert all(value < 1 / n for value in other_deltas(0.5 / n, n))

    def test_a_bound_out_of_reach_is_no_number(self):
        assert number(None) == "not computed" and number("inf") == "no finite bound" and number(1.23456) == "1.2346"


class TestWords:
    def report(self, spent=None, **changes):
        spent = spent or [(event(), 20)]
        ending = {"status": "finished", "applied_steps": 20, "metrics": {}} | changes
        return assemble(start(**ending.pop("start", {})), spent, **ending)

    def test_it_says_all_that_it_knows(self):
        said = to_markdown(self.report())
        for part in (
            "one training record", "add or remove", "Poisson", "q = 0.10000", "N = 1000", "sigma = 1.0000", "C = 0.5",
            "exact norms", "20 counted by the ledger, of 23 in the budget (20 to make, 3 that crashes may lose)",
            "1e-05", "to remove dominates", "`train/loss`", "torch 2", "What the guarantee rests on",
        ):  # fmt: skip
            assert part in said, part
        assert "discarded" not in said and "Phases" not in said

    def test_groups_are_the_unit(self):
        said = to_markdown(self.report(start={"mechanism": {"group_column": "author"}}))
        assert "all training records of one value of column author" in said and "one training record" not in said
        assert "1000 groups" in said

    def test_discarded_steps(self):
        report = self.report([(event(), 22)], applied_steps=20)
        assert report["steps"] == 22 and report["discarded_steps"] == 2
        assert "discarded steps: 2 were begun and count" in to_markdown(report)

    def test_phases_and_forks(self):
        spent = [(event(), 20), (event(noise_multiplier=1.5), 5)]
        report = self.report(spent, parents=["ab12"], applied_steps=25)
        said = to_markdown(report)
        assert "| 2 | 5 | 1.5000 | 0.10000 | exact |" in said and "run `ab12`" in said
        assert sum("union" in line for line in report["assumptions"]) == 1
        assert sum("by looking at" in line and "phases" in line for line in report["assumptions"]) == 1
        history = [(StepEvent.from_dict(e), count) for e, count in spent]
        assert report["epsilon"]["upper"] == Accountant(history).epsilon(1e-4).upper

    def test_earlier_training_counts_on_top(self):
        assert any("counts on top" in line for line in self.report()["assumptions"])
        report = self.report(start={"earlier_runs": ["runs/before"]})
        assert any("runs/before" in line for line in report["assumptions"])

    def test_no_epsilon_where_nothing_is_private(self):
        report = self.report(not_private_because="a test stream")
        assert not report["private"] and report["epsilon"] is report["directions"] is None
        said = to_markdown(report)
        assert "**NOT PRIVATE**: a test stream" in said and "upper bound" not in said and "rests on" not in said

    def test_comparison(self):
        other = self.report(not_private_because="baseline", metrics={"val/loss": 0.25}, start={"name": "other"})
        said = to_markdown(self.report(metrics={"val/loss": 0.5}), [other])
        assert re.search(r"\| a run \| \d\.\d{4} \| 0\.500 \|", said) and "| other | not private | 0.250 |" in said

    def test_names_with_several_numbers(self):
        assert grouped(["a.0.b.7.w", "a.1.b.7.w", "c.bias"]) == ["a.{0,1}.b.7.w", "c.bias"]


class Tags(HTMLParser):
    """The tags, their attributes and the text of a document; fails where they are not nested."""

    VOID = {"meta", "!doctype"}

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes, self.text = [], set(), [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.text += "" if tag in ("code", "strong") else " "

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


class TestHTML:
    EVIL = '<script>alert("1")</script> & <img src=x> `**'

    def test_one_file_with_nothing_from_elsewhere(self):
        report = TestWords().report(metrics={"val/loss": 0.5})
        page = to_html(report)
        tags = Tags(page)
        assert not tags.seen & {"script", "link", "img", "iframe"} and "url(" not in page and "@import" not in page
        assert {name for name, _ in tags.attributes} <= {"lang", "charset", "name", "content", "class"}
        assert ("name", "viewport") in tags.attributes
        # The same words as in Markdown, but for the marks.
        words = re.sub(r"[*`|#]|---", "", to_markdown(report)).split()
        assert words[2:] == tags.text.split()[-len(words[2:]) :]

    def test_what_stands_in_it_is_escaped(self):
        report = TestWords().report(status=self.EVIL, metrics={self.EVIL: 1.0}, start={"name": self.EVIL})
        tags = Tags(to_html(report))
        assert not tags.seen & {"script", "img"}
        assert 'alert("1")</script> & <img src=x>' in tags.text

    def test_a_bar_in_a_name_does_not_break_the_markdown_table(self):
        row = next(
            line for line in to_markdown(TestWords().report(metrics={"a|b\nc": 1.0})).splitlines() if "a\\|b" in line
        )
        assert row == "| run | epsilon | a\\|b c | seconds of training |"


class TestFiles:
    def test_what_is_infinite_or_no_number_stays_json(self, tmp_path):
        report = TestWords().report(metrics={"val/loss": float("nan")})
        report["epsilon"]["upper"] = float("inf")
        write_report(tmp_path, report)
        json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
        assert "no finite bound" in to_markdown(read_report(tmp_path))
        assert {f.name for f in tmp_path.iterdir()} == {"report.json", "report.md", "report.html"}

    @pytest.mark.parametrize("content", ["{", "[]", "{}", b"\xff\xfe", '{"mechanism": 3}'])
    def test_a_damaged_report_is_one_line(self, content, tmp_path, capsys):
        (tmp_path / "report.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ReportError, match="report.json: damaged"):
            read_report(tmp_path)
        assert main(["report", str(tmp_path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_ledger_of_another_loop_names_no_mechanism(self, tmp_path):
        Ledger.create(tmp_path, {"num_records": 3}).close()
        with pytest.raises(ReportError, match="names no mechanism"):
            read_report(tmp_path)

    def test_no_torch_is_needed(self, tmp_path):
        write_report(tmp_path, TestWords().report())
        code = (
            "import sys; from dprc_lightning.cli import main\n"
            f"main(['report', {str(tmp_path)!r}, '--format', 'html'])\n"
            "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules), 'heavy'"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.startswith("<!doctype html>"), done.stderr


class Logging(ToyModule):
    """Logs under names of its own."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("quality", 0.5, on_step=True, on_epoch=True)


class TestRuns:
    def test_figures_of_any_name_with_their_step(self, tmp_path):
        module = Logging(privacy(steps=6))
        run = trainer(tmp_path, limit_val_batches=1.0)
        run.fit(module, datamodule=ToyData())
        report = read_report(tmp_path)
        assert set(report["metrics"]) == {"val/accuracy", "quality"} and report["metrics"]["quality"] == 0.5
        # An epoch has four steps, and validation comes at its end; the second epoch has two.
        assert report["applied_steps"] == 6 and report["metrics_step"]["val/accuracy"] in (4, 6)
        assert report["discarded_steps"] == 0
        run.test(module, datamodule=ToyData(), verbose=False)
        after = read_report(tmp_path)
        assert after["metrics_step"] == report["metrics_step"] | {"test/accuracy": 6}
        assert after["epsilon"] == report["epsilon"]

    def test_figures_of_other_weights_do_not_pass_for_the_runs_own(self, tmp_path):
        for name in ("a", "b"):
            run = trainer(tmp_path / name, **checkpointing(tmp_path / name))
            run.fit(ToyModule(privacy()), datamodule=ToyData())
        before = read_report(tmp_path / "b")
        module, first = ToyModule(privacy()), tmp_path / "a" / "checkpoints" / "step=1.ckpt"
        tester = trainer(tmp_path / "elsewhere")
        tester.test(module, datamodule=ToyData(), ckpt_path=first, weights_only=True, verbose=False)
        report = read_report(tmp_path / "a")
        assert "test/accuracy" not in report["metrics"]
        assert report["metrics_by_checkpoint"]["step=1.ckpt"]["step"] == 1
        assert "step=1.ckpt, step 1" in (tmp_path / "a" / "report.md").read_text()
        last = tmp_path / "a" / "checkpoints" / "step=4.ckpt"
        tester.test(module, datamodule=ToyData(), ckpt_path=last, weights_only=True, verbose=False)
        assert read_report(tmp_path / "a")["metrics_step"]["test/accuracy"] == 4
        # A trained module that evaluates another run's checkpoint.
        run.test(run.lightning_module, datamodule=ToyData(), ckpt_path=first, weights_only=True, verbose=False)
        assert read_report(tmp_path / "b") == before

    def test_a_test_stream_is_remembered_and_said_at_once(self, tmp_path, capsys):
        first = ToyModule(privacy())
        first.fail_at = 2
        with pytest.raises(RuntimeError):
            trainer(tmp_path, ZeroNoise(), **checkpointing(tmp_path)).fit(first, datamodule=ToyData())
        said = capsys.readouterr().out
        assert "NOT PRIVATE" in said and "Private run" not in said and "epsilon <=" not in said
        assert "tests" in Ledger.open(tmp_path, read_only=True).meta["not_private_because"]
        # Secret noise from here on does not mend what was released.
        checkpoint = tmp_path / "checkpoints" / "step=1.ckpt"
        trainer(tmp_path).fit(ToyModule(privacy()), datamodule=ToyData(), ckpt_path=checkpoint, weights_only=True)
        report = read_report(tmp_path)
        assert not report["private"] and report["epsilon"] is None and report["steps"] == 4
        said = capsys.readouterr().out
        assert "NOT PRIVATE" in said and "Private run" not in said

    def test_the_start_says_what_is_promised(self, tmp_path, capsys):
        trainer(tmp_path).fit(ToyModule(privacy(crash_allowance=2)), datamodule=ToyData())
        said = capsys.readouterr().out
        upper = epsilon(noise_multiplier=1.0, delta=1e-3, sample_rate=0.25, steps=6).upper
        (told,) = re.findall(r"epsilon <= (\d+\.\d{4}) at delta 0\.001 for one training record", said)
        # Composed once by the lookup of the run and once by the accountant.
        assert abs(float(told) - upper) < 2e-4
        assert "budget 6 steps: 2 of them" in said

    def test_resumed_and_discarded(self, tmp_path):
        module = ToyModule(privacy(crash_allowance=1))
        module.fail_at = 3
        with pytest.raises(RuntimeError):
            trainer(tmp_path, **checkpointing(tmp_path)).fit(module, datamodule=ToyData())
        checkpoint = tmp_path / "checkpoints" / "step=2.ckpt"
        again = ToyModule(privacy(crash_allowance=1))
        trainer(tmp_path).fit(again, datamodule=ToyData(), ckpt_path=checkpoint, weights_only=True)
        report = read_report(tmp_path)
        assert (report["steps"], report["applied_steps"], report["discarded_steps"]) == (5, 4, 1)
        assert report["epsilon"]["upper"] == epsilon(noise_multiplier=1.0, delta=1e-3, sample_rate=0.25, steps=5).upper

    def test_a_fork_with_more_steps_names_its_parent_and_its_phases(self, tmp_path):
        wanted = {"noise_multiplier": None, "epsilon": 4.0}
        first = trainer(tmp_path / "a", **checkpointing(tmp_path / "a"))
        first.fit(ToyModule(privacy(**wanted)), datamodule=ToyData())
        checkpoint = tmp_path / "a" / "checkpoints" / "step=4.ckpt"
        longer = ToyModule(privacy(**wanted | {"epsilon": 6.0, "steps": 6}))
        trainer(tmp_path / "b").fit(longer, datamodule=ToyData(), ckpt_path=checkpoint, weights_only=True)
        report = read_report(tmp_path / "b")
        assert report["forked_from"] == [Ledger.open(tmp_path / "a", read_only=True).run_id]
        assert [phase["steps"] for phase in report["phases"]] == [4, 2]
        assert 5.9 < report["epsilon"]["upper"] <= 6.0 and report["applied_steps"] == 6
        said = (tmp_path / "b" / "report.md").read_text()
        assert f"run `{report['forked_from'][0]}`" in said and "| 2 | 2 |" in said
        (tmp_path / "b" / "report.json").unlink()
        again = read_report(tmp_path / "b")
        assert all(again[name] == report[name] for name in ("forked_from", "phases", "epsilon", "mechanism"))
        parent = read_report(tmp_path / "a")
        assert parent["forked_from"] == [] and parent["epsilon"]["upper"] <= 4.0

    def test_the_report_is_made_again_from_what_is_there(self, tmp_path, capsys):
        trainer(tmp_path).fit(ToyModule(privacy(group_column=None)), datamodule=ToyData())
        whole = read_report(tmp_path)
        for name in ("report.json", "report.md", "report.html"):
            (tmp_path / name).unlink()
        again = read_report(tmp_path)
        assert again["status"] == "killed or still running: 4 steps in the ledger"
        for name in ("epsilon", "epsilon_at", "mechanism", "parameters", "versions", "name", "unit", "assumptions"):
            assert again[name] == whole[name], name
        assert again["discarded_steps"] is None
        (tmp_path / "resolved.json").unlink()
        alone = read_report(tmp_path)
        assert alone["epsilon"] == whole["epsilon"] and alone["status"] == again["status"]
        capsys.readouterr()
        for form in ("md", "html", "json"):
            assert main(["report", str(tmp_path), "--format", form]) == 0
            assert "killed or still running" in capsys.readouterr().out
        assert not (tmp_path / "report.json").exists(), "reading writes nothing"

    def test_a_report_behind_its_ledger_is_stale(self, tmp_path):
        trainer(tmp_path).fit(ToyModule(privacy(steps=4, crash_allowance=2)), datamodule=ToyData())
        spent = Ledger.open(tmp_path, read_only=True).spent()
        with Ledger.open(tmp_path) as ledger:
            ledger.reserve(spent[0][0]).take()
        report = read_report(tmp_path)
        assert report["steps"] == 5 and "killed" in report["status"] and report["metrics"] == {}
        assert report["epsilon"]["upper"] == epsilon(noise_multiplier=1.0, delta=1e-3, sample_rate=0.25, steps=5).upper

    def test_kill_9(self, tmp_path):
        """The process ends between two instructions; the report tells every step that was begun."""
        program = (
            "import os, signal, toy\n"
            "class Killed(toy.ToyModule):\n"
            "    def training_step(self, batch, i):\n"
            "        super().training_step(batch, i)\n"
            "        if len(self.sequences) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
            f"toy.trainer({str(tmp_path)!r}).fit(Killed(toy.privacy()), datamodule=toy.ToyData())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        report = read_report(tmp_path)
        assert report["steps"] == 2 and report["status"].startswith("killed or still running: 2 steps")
        assert report["parameters"] and report["epsilon"]["upper"] > 0

    def test_a_killed_baseline_leaves_no_count(self, tmp_path):
        trainer(tmp_path).fit(ToyModule(privacy(baseline_without_privacy=True)), datamodule=ToyData())
        assert read_report(tmp_path)["steps"] == 4
        (tmp_path / "report.json").unlink()
        report = read_report(tmp_path)
        assert report["steps"] is None and not report["private"]
        assert "steps: not known" in to_markdown(report)


def test_unprotected_figures_are_named(tmp_path):
    for allowed in (True, False):
        folder = tmp_path / str(allowed)
        trainer(folder).fit(ToyModule(privacy(log_unprotected=allowed)), datamodule=ToyData())
        report = read_report(folder)
        assert ("train/loss" in report["logged_unprotected"]) is allowed
        assert ("`train/loss`" in (folder / "report.md").read_text()) is allowed


def test_errors_are_typed():
    assert issubclass(ReportError, DPRCError)
