"""A private run with random signs: its ledger, and that every place that tells epsilon says it is not certified."""

import json

import lightning.pytorch as pl
import pytest
from toy import ToyData, ToyModule, checkpointing, privacy, trainer

from dprc_lightning.accounting import Accountant, Ledger, StepEvent, epsilon
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.model_card import Contents, model_card
from dprc_lightning.report import assemble, read_report, to_html, to_markdown
from dprc_lightning.sketch import RademacherMatrix

pytestmark = pytest.mark.filterwarnings("ignore")


def signs(**changes):
    settings = {"estimator": "hutchinson", "sketch_dim": 64, "projection": "rademacher", "noise_multiplier": 2.0}
    return privacy(**(settings | changes))


class Watch(pl.Callback):
    """What kind of P the layers got."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *args):
        self.seen += module.handle._state.projections._cache.values()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signs")
    watch = Watch()
    settings = checkpointing(folder)
    settings["callbacks"].append(watch)
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("builtins.print", lambda *args, **_: said.append(" ".join(map(str, args))))
        trainer(folder, **settings).fit(ToyModule(signs()), datamodule=ToyData())
    return folder, watch.seen, "\n".join(said)


def test_the_layers_got_bits(run):
    _, seen, _ = run
    assert len(seen) == 4 * 2 and all(isinstance(matrix, RademacherMatrix) for matrix in seen)
    assert {matrix.shape for matrix in seen} == {(4, 64)}


def test_the_ledger_and_the_mechanism_name_it(run):
    folder, _, _ = run
    ledger = Ledger.open(folder, read_only=True)
    assert ledger.meta["mechanism"]["projection"] == "rademacher"
    ((event, count),) = ledger.spent()
    assert (event["projection"], event["sketch_dim"], count) == ("rademacher", 64, 4)
    assert not StepEvent.from_dict(event).certified


def test_it_is_said_at_the_start_and_at_the_end(run):
    opening, closing = run[2].split("epsilon (NOT CERTIFIED) at delta", 1)
    assert "NOT CERTIFIED: the projection's entries are random signs" in opening and "(k = 64, rademacher)" in opening
    assert "lower" in closing


def test_the_report_says_it(run):
    folder, _, _ = run
    report = json.loads((folder / "report.json").read_text())
    assert report["private"] and report["certified"] is False and "on a grid only" in report["not_certified_because"]
    told = {name: (folder / name).read_text() for name in ("report.md", "report.html")}
    assert all("NOT CERTIFIED" in text and "certified upper bound" not in text for text in told.values())
    # It is the accountant's number for these steps, and more than Gaussian entries would have cost.
    mechanism = {"noise_multiplier": 2.0, "delta": 1e-3, "sample_rate": 0.25, "steps": 4, "sketch_dim": 64}
    found = epsilon(**mechanism, projection="rademacher")
    assert report["epsilon"] == {**dict(zip(("lower", "estimate", "upper"), found, strict=True)), "delta": 1e-3}
    assert found.upper > epsilon(**mechanism).upper
    assert read_report(folder) == report


def test_the_model_card_says_it(run):
    report = read_report(run[0])
    card = model_card(report, Contents("Toy", False, "", None, {}, None, False), checkpoint="last", step=4)
    assert "certified: false" in card and "projection: rademacher" in card and "NOT CERTIFIED" in card


def test_it_cannot_go_on_with_another_projection(run):
    folder, _, _ = run
    (checkpoint,) = (folder / "checkpoints").glob("step=4*")
    with pytest.raises(ConfigurationError, match="projection=rademacher, now it is gaussian"):
        trainer(folder).fit(ToyModule(signs(projection="gaussian")), datamodule=ToyData(), ckpt_path=checkpoint)


def facts(projection):
    mechanism = signs(projection=projection).resolve(1000, 64).to_dict()
    return {
        "name": "a run", "not_private_because": None, "on_nonfinite": "raise", "precision": "32-true", "parameters": [],
        "data": {}, "logged_unprotected": [], "paths": {}, "versions": {}, "mechanism": mechanism,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("projections", "certified"),
    [(["gaussian"], True), (["rademacher"], False), (["gaussian", "rademacher"], False)],
)
def test_one_step_that_is_not_certified_is_enough(projections, certified):
    spent = [(StepEvent(2.0, 0.05, 64, projection).to_dict(), 3) for projection in projections]
    report = assemble(facts(projections[0]), spent, status="finished")
    assert report["certified"] is certified is Accountant((StepEvent.from_dict(e), n) for e, n in spent).certified
    for text in (to_markdown(report), to_html(report)):
        assert ("certified upper bound" in text) is certified and ("NOT CERTIFIED" in text) is not certified


def test_what_is_not_private_is_not_called_either():
    report = assemble(facts("rademacher"), [], status="finished", not_private_because="a test")
    assert report["certified"] is None and "CERTIFIED" not in to_markdown(report)


def test_reports_of_earlier_releases_were_certified(run, tmp_path):
    """They had no word for it, and no other projection than Gaussian."""
    spent = [(StepEvent(2.0, 0.05, 64).to_dict(), 3)]
    report = assemble(facts("gaussian"), spent, status="finished")
    told = {name: value for name, value in report.items() if not name.startswith(("certified", "not_certified"))}
    (tmp_path / "report.json").write_text(json.dumps(told))
    assert read_report(tmp_path)["certified"] is True
    assert "certified upper bound" in to_markdown(read_report(tmp_path))
