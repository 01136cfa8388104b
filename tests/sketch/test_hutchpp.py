"""Hutch++ of factors, against NumPy in float64 and against the law that the accountant integrates over."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.sketch import Factors, GaussianProjections, StreamedMatrix, head_name, hutchpp_squared_norms, sketch
from dprc_lightning.sketch import hutchpp as module
from dprc_lightning.sketch.hutchpp import _Gradient, _range, floats_per_record, orthonormal


def whole(uses, side):
    """M of each record, [B, d, p], float64."""
    total = 0.0
    for use in uses:
        left = torch.nn.functional.one_hot(use.left, use.shape[0]) if use.one_hot else use.left
        total = total + torch.einsum("bti,btj->bij", left.double(), use.right.double())
    return (total.mT if side == 0 else total).numpy()


def reference(uses, projection, head, side):
    """By the definition: an orthonormal basis of the range of M M^T S from a singular value decomposition."""
    found = []
    for gradient in whole(uses, side):
        vectors, values, _ = np.linalg.svd(gradient @ (gradient.T @ head.double().numpy()), full_matrices=False)
        basis = vectors[:, values > 1e-12 * max(values.max(), 1e-300)]
        sketched = gradient @ projection.double().numpy()
        tail = sketched - basis @ (basis.T @ sketched)
        found.append(np.square(basis.T @ gradient).sum() + np.square(tail).sum())
    return torch.tensor(found)


def make_uses(kinds, records, length, n0, n1):
    return [
        Factors(
            torch.randint(0, n0, (records, length)) if kind == "ids" else torch.randn(records, length, n0),
            torch.randn(records, length, n1),
            (n0, n1),
        )
        for kind in kinds
    ]


def of_spectrum(values, n0=40, n1=30, dtype=torch.float32, scale=1.0):
    """One record whose gradient has these singular values."""
    vectors = [torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64))[0] for n in (n0, n1)]
    left = (vectors[0] * torch.as_tensor(values, dtype=torch.float64) * scale).mT
    return Factors(left.unsqueeze(0).to(dtype), vectors[1].mT.unsqueeze(0).to(dtype), (n0, n1))


def draw(d, p, k):
    return torch.randn(p, k) / math.sqrt(k), torch.randn(d, k)


class TestTheNumber:
    @pytest.mark.parametrize(
        "kinds", [["dense"], ["ids"], ["dense", "ids"], ["ids", "ids"], ["ids", "dense", "ids"], ["dense", "dense"]]
    )
    @pytest.mark.parametrize("length", [1, 7, 60, 700])
    def test_any_mix_of_uses(self, kinds, length):
        """More and fewer tokens than ids, than the rank, and than a block has rows."""
        torch.manual_seed(0)
        uses = make_uses(kinds, 3, length, 40, 20)
        projection, head = draw(20, 40, 6)
        found = hutchpp_squared_norms(uses, projection, head, 0)
        assert torch.allclose(found, reference(uses, projection, head, 0), rtol=1e-5)

    @pytest.mark.parametrize("columns", [1, 5, 12])
    def test_the_other_side_and_any_blocks(self, columns, monkeypatch):
        torch.manual_seed(0)
        uses = make_uses(["dense", "dense"], 2, 21, 12, 33)
        projection, head = draw(12, 33, columns)
        expected = reference(uses, projection, head, 1)
        assert torch.allclose(hutchpp_squared_norms(uses, projection, head, 1), expected, rtol=1e-5)
        for name, size in (("BLOCK_ROWS", 4), ("BLOCK_COLUMNS", 2), ("BLOCK_WIDTH", 7)):
            monkeypatch.setattr(module, name, size)
            assert torch.allclose(hutchpp_squared_norms(uses, projection, head, 1), expected, rtol=1e-5)

    def test_one_id_at_every_position_in_blocks(self):
        torch.manual_seed(0)
        use = Factors(torch.full((2, 1500), 3), torch.randn(2, 1500, 9), (50, 9))
        projection, head = draw(9, 50, 4)
        # Rank one: the head is the whole gradient.
        exact = use.right.double().sum(1).square().sum(1)
        assert torch.allclose(hutchpp_squared_norms([use], projection, head, 0), exact, rtol=1e-6)

    def test_small_rows_beside_a_large_one_are_not_lost(self):
        """2^24 + 1 is 2^24 in float32: added one by one the ones would vanish, and the head with them."""
        torch.manual_seed(0)
        ones = 65536
        rows = torch.tensor([2.0**24, *[1.0] * ones, -(2.0**24)])
        use = Factors(torch.full((1, len(rows)), 3), rows.view(1, -1, 1).expand(1, -1, 9), (50, 9))
        found = hutchpp_squared_norms([use], *draw(9, 50, 4), 0)
        # A block's own rounding is left, of which the floor of a norm takes care.
        assert float(found.sqrt()) == pytest.approx(3 * ones, rel=0.02)

    def test_a_projection_that_is_made_where_it_is_used(self):
        torch.manual_seed(0)
        uses = make_uses(["dense", "ids"], 2, 9, 60, 20)
        kept, streamed = (GaussianProjections(bytes(32), 4) for _ in range(2))
        streamed.stream(["w", head_name("w")])
        found = []
        for source in (kept, streamed):
            source.begin_step(1)
            drawn = [source.matrix(name, n, torch.device("cpu")) for name, n in (("w", 60), (head_name("w"), 20))]
            found.append(hutchpp_squared_norms(uses, *drawn, 0))
        assert isinstance(drawn[1], StreamedMatrix)
        assert torch.allclose(found[0], found[1], rtol=1e-6)

    def test_a_record_alone_and_among_others(self):
        """Also beside one that is not finite, and one that is zero."""
        torch.manual_seed(0)
        uses = make_uses(["dense", "ids"], 4, 30, 40, 20)
        projection, head = draw(20, 40, 6)
        together = hutchpp_squared_norms(uses, projection, head, 0)
        uses[0].right[1, 3] = math.nan
        for use in uses:
            use.right[2] = 0.0
        beside = hutchpp_squared_norms(uses, projection, head, 0)
        assert not beside[1].isfinite() and beside[2] == 0
        for i in (0, 3):
            alone = hutchpp_squared_norms(
                [Factors(u.left[i : i + 1], u.right[i : i + 1], u.shape) for u in uses], projection, head, 0
            )
            assert torch.allclose(torch.stack([together[i], beside[i]]), alone.expand(2), rtol=1e-6)

    @pytest.mark.parametrize("kind", ["dense", "ids"])
    def test_nothing_at_all(self, kind):
        for records, length in ((0, 5), (2, 0)):
            uses = make_uses([kind], records, length, 40, 20)
            assert torch.equal(
                hutchpp_squared_norms(uses, *draw(20, 40, 3), 0), torch.zeros(records, dtype=torch.float64)
            )

    def test_autocast_of_the_caller_changes_nothing(self):
        torch.manual_seed(0)
        uses, drawn = make_uses(["dense"], 2, 9, 40, 20), draw(20, 40, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = hutchpp_squared_norms(uses, *drawn, 0)
        assert torch.equal(found, hutchpp_squared_norms(uses, *drawn, 0))

    def test_memory(self):
        torch.manual_seed(0)
        records, length, n0, n1, k = 2, 64, 3000, 100, 16
        (use,) = make_uses(["dense"], records, length, n0, n1)
        projection, head = draw(n1, n0, k)
        with LiveMemory() as live:
            live.add([use.left, use.right, projection, head])
            before = live.current
            hutchpp_squared_norms([use], projection, head, 0)
        of_block = 2 * length * k + n0 * k
        assert live.peak - before <= 4 * records * (floats_per_record(n0, n1, k) + of_block)
        # The gradient itself would be more.
        assert live.peak - before < 4 * records * n0 * n1


STRONG = {
    "four of forty": [3.0] * 4 + [0.1] * 26,
    "one over j": [1.0 / j for j in range(1, 31)],
    "geometric": [0.8**j for j in range(30)],
}


class TestTheLaw:
    @pytest.mark.parametrize("spectrum", [*STRONG.values(), [1.0] * 30, [1.0]])
    def test_unbiased(self, spectrum):
        torch.manual_seed(1)
        use, expected = of_spectrum(spectrum), sum(s * s for s in spectrum)
        estimates = torch.cat([hutchpp_squared_norms([use], *draw(30, 40, 8), 0) for _ in range(500)])
        error = float(estimates.std()) / math.sqrt(500) + 1e-6 * expected
        assert abs(float(estimates.mean()) - expected) < 4 * error

    @pytest.mark.parametrize("spectrum", STRONG.values(), ids=STRONG)
    def test_a_strong_head_has_far_less_variance_than_hutchinson(self, spectrum):
        torch.manual_seed(2)
        use, ours, theirs = of_spectrum(spectrum), [], []
        for _ in range(300):
            projection, head = draw(30, 40, 8)
            ours.append(hutchpp_squared_norms([use], projection, head, 0))
            theirs.append(sketch(use, projection, 0).double().square().sum())
        assert float(torch.stack(theirs).var()) > 5 * float(torch.cat(ours).var())

    def test_given_the_head_the_rest_is_chi_square_with_k_degrees(self):
        """k + 1 equal singular values: the head has k of them, and one is left."""
        torch.manual_seed(3)
        k = 6
        use, head = of_spectrum([1.0] * (k + 1), n1=k + 1), torch.randn(k + 1, k)
        estimates = torch.cat([hutchpp_squared_norms([use], draw(k + 1, 40, k)[0], head, 0) for _ in range(1000)])
        ratio = (estimates / (k + 1)).numpy()
        tau = k / (k + 1)
        left = (ratio - tau) * (k + 1) * k
        assert stats.kstest(left, stats.chi2(k).cdf).pvalue > 1e-3
        # The test has the power to see a wrong k.
        assert stats.kstest(left, stats.chi2(k + 1).cdf).pvalue < 1e-6


SPECTRA = {
    "zero": [0.0],
    "rank 1": [1.0],
    "rank k": [1.0, 0.9, 0.7, 0.5, 0.3, 0.1],
    "rank k + 1": [1.0] * 7,
    "flat": [1.0] * 30,
    "just above the tolerance of the rank": [1.0, 1e-2, 4e-3, 3.3e-3, 3.1e-3, 3e-3, 1e-3],
    "falling to the rounding": [10.0**-j for j in range(10)],
    "one far above": [1.0] + [1e-4] * 29,
    "geometric": [0.6**j for j in range(30)],
}


def repeated(use, times):
    return Factors(use.left.repeat(1, times, 1), use.right.repeat(1, times, 1), use.shape)


class TestNeverTooSmallThroughTheBasis:
    """A head that loses norm would make the estimate too small whatever P is."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA)
    def test_with_the_identity_for_p_the_norm_is_exact(self, spectrum, dtype):
        """So nothing is lost, of the factors as they are: bfloat16 ones are exact in float64."""
        torch.manual_seed(4)
        for scale in (1e-15, 1e-6, 1.0, 1e6, 1e15):
            for times in (1, 3, 200):
                use = repeated(of_spectrum(spectrum, dtype=dtype, scale=scale), times)
                exact = torch.from_numpy(np.square(whole([use], 0)).sum((1, 2)))
                for _ in range(3):
                    found = hutchpp_squared_norms([use], torch.eye(40), torch.randn(30, 6), 0)
                    assert torch.allclose(found, exact, rtol=3e-6, atol=0.0)

    @pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA)
    def test_the_basis_is_orthonormal_or_zero(self, spectrum):
        torch.manual_seed(5)
        for trial in range(10):
            use = repeated(of_spectrum(spectrum), 1 + trial % 3)
            basis, error = orthonormal(_range(_Gradient([use], 0), torch.randn(30, 6)))
            gram = (basis.double().mT @ basis.double())[0]
            present = (basis[0] != 0).any(0)
            # Exactly zero, or of norm one; never something between.
            assert torch.equal(present, gram.diagonal() > 0.5)
            assert float((gram - torch.diag(present.double())).abs().max()) < 1e-5
            assert float((gram - torch.diag(present.double())).norm()) <= float(error) * (1 + 1e-9) < 1e-5
            assert int(present.sum()) <= min(sum(s > 0 for s in spectrum), 6)
            # Nothing near the tolerance: as many as the rank.
            assert min(spectrum) < 0.1 or int(present.sum()) == min(len(spectrum), 6)
            # The weights of the law with this very basis, and the division that makes them enough.
            gradient = torch.from_numpy(whole([use], 0))[0]
            wide = basis[0].double()
            head = (wide.mT @ gradient).square().sum()
            rest = (gradient - wide @ (wide.mT @ gradient)).square().sum()
            assert float((head + rest) / (1 - error)) >= float(gradient.square().sum()) * (1 - 1e-14)

    @pytest.mark.parametrize("shrunk", [1e-6, 1e-5, 1e-4])
    def test_a_basis_that_is_too_short_is_made_up_for(self, shrunk, monkeypatch):
        torch.manual_seed(6)
        use, head = of_spectrum([1.0] * 6), torch.randn(30, 6)
        qr = torch.linalg.qr
        monkeypatch.setattr(torch.linalg, "qr", lambda a: (qr(a)[0] * (1 - shrunk), qr(a)[1]))
        found = float(hutchpp_squared_norms([use], torch.eye(40), head, 0))
        # Without the division this would be 6 (1 - 2 shrunk).
        assert 6 * (1 - 3e-7) < found < 6 * (1 + 20 * shrunk)

    @pytest.mark.parametrize("broken", [0.5, 1.5, math.nan, math.inf])
    def test_without_a_usable_basis_the_estimate_is_hutchinsons(self, broken, monkeypatch):
        torch.manual_seed(7)
        (use,) = make_uses(["dense"], 2, 9, 40, 20)
        projection, head = draw(20, 40, 4)
        good = hutchpp_squared_norms([use], projection, head, 0)
        qr = torch.linalg.qr

        def bad(a):
            basis, triangle = qr(a)
            basis[1, 2, 0] *= broken
            return basis, triangle

        monkeypatch.setattr(torch.linalg, "qr", bad)
        found = hutchpp_squared_norms([use], projection, head, 0)
        sketched = sketch(use, projection, 0).double().square().sum((1, 2))
        assert torch.equal(found[0], good[0]) and not torch.isclose(good[1], sketched[1], rtol=1e-3)
        assert torch.isclose(found[1], sketched[1], rtol=1e-6)


def test_the_head_has_a_name_that_no_parameter_can_have():
    """So S is independent of every P of the step."""
    layer = torch.nn.Linear(2, 2)
    name = head_name("weight")
    with pytest.raises(KeyError, match="contain"):
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(KeyError, match="empty"):
        layer.add_module("", torch.nn.Linear(2, 2))
    source = GaussianProjections(bytes(32), 50)
    source.begin_step(0)
    tail, head = (source.matrix(n, 400, torch.device("cpu")) for n in ("weight", name))
    assert abs(float((tail * head).sum()) * 50 / math.sqrt(tail.numel())) < 5
