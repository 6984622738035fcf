"""A wrong norm is explained by the gradients that it is of, where one account alone fits."""

from __future__ import annotations

import math

import pytest
import torch

from fsdp_testing.explain.norms import Norm, norm_of_what

DRAW = torch.Generator().manual_seed(1)
GRADIENTS = {
    fqn: torch.randn(4, 4, generator=DRAW, dtype=torch.float64).to(dtype)
    for fqn, dtype in (("a.weight", torch.float64), ("a.bias", torch.float64), ("b.weight", torch.float32))
}


def norm(p: float, **counts: int) -> float:
    powers = (counts.get(f.replace(".", "_"), 1) * float((g.double().abs() ** p).sum()) for f, g in GRADIENTS.items())
    return float(sum(powers) ** (1 / p))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_the_one_account_that_fits_is_told(p: float) -> None:
    def expected(got: float) -> str:
        return norm_of_what(Norm(got, norm(p), 1e-12, p), GRADIENTS)

    assert expected(norm(p, a_weight=0)) == "the norm of all gradients but a.weight"
    assert expected(norm(p, a_weight=0, a_bias=0)) == "the norm of all gradients but a"
    assert expected(norm(p, b_weight=2)) == "the norm of all gradients, with b.weight twice"
    assert expected(norm(p, a_weight=3, a_bias=3, b_weight=3)) == "the norm of all gradients, each counted 3 times"
    assert expected(0.0) == "zero, as if there were no gradient"
    assert (
        expected(norm(p, a_weight=5))
        == expected(norm(p) * 1.01)
        == expected(math.inf)
        == expected(norm(p, a_bias=0) + 1e-9)
        == ""
    )


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_a_norm_that_lacks_a_unit_or_holds_an_earlier_norm_is_told(p: float) -> None:
    units = {"a.weight": "", "a.bias": "a", "b.weight": ""}

    def expected(got: float, **known: object) -> str:
        return norm_of_what(Norm(got, norm(p), 1e-12, p), GRADIENTS, **known)

    lacking = norm(p, a_weight=0, b_weight=0)
    assert expected(lacking, units=units) == "the norm of all gradients but those of the root"
    assert expected(lacking) == ""
    both = (norm(p) ** p + 1.5**p) ** (1 / p)
    assert expected(both, earlier={3: 1.5}) == "the norm of the gradients and of the norm of operation 3"
    assert expected(both, earlier={3: 1.5, 4: 1.5}) == ""
    larger = Norm(9.0, 2.0, 1e-12, math.inf)
    assert (
        norm_of_what(larger, GRADIENTS, earlier={1: 9.0}) == "the norm of the gradients and of the norm of operation 1"
    )


def test_nothing_is_told_where_several_accounts_fit_or_the_right_norm_is_another() -> None:
    alike = {"a.weight": GRADIENTS["a.weight"], "b.weight": GRADIENTS["a.weight"].clone(), "c.weight": torch.ones(2)}
    powers = [float(gradient.double().square().sum()) for gradient in alike.values()]
    without = Norm(math.sqrt(sum(powers) - powers[0]), math.sqrt(sum(powers)), 1e-12, 2.0)
    assert norm_of_what(without, alike) == ""
    assert norm_of_what(Norm(norm(2.0, a_bias=0), norm(2.0) + 0.1, 1e-12, 2.0), GRADIENTS) == ""
    assert norm_of_what(Norm(2.0, 1.0, 1e-12, math.inf), GRADIENTS) == ""


def test_what_is_no_norm_of_some_of_the_gradients_is_told_by_where_it_comes_from() -> None:
    due, mine = norm(2.0), [GRADIENTS["a.bias"], GRADIENTS["b.weight"][:2]]

    def expected(got: float, p: float = 2.0, **known: bool) -> str:
        return norm_of_what(Norm(got, due, 1e-12, p), GRADIENTS, mine, {1: 5.0}, **known)

    own = math.sqrt(sum(float(part.double().square().sum()) for part in mine))
    assert expected(own) == "the norm of the rank's own part of the gradients"
    assert expected(norm(3.0)) == "the 3-norm"
    assert expected(due + 5.0) == "the right norm plus the norm of operation 1"
    assert expected(float(torch.tensor(due).float())) == "the right values, rounded to float32"
    assert expected(math.nan, lacks_elements=True) == "no number, just where ranks have no element of some parameter"
    assert expected(1.0, math.inf) == "1, because any number to the power 1/p is 1 for infinite p"
    assert expected(due + 4.0) == expected(own + 1e-9) == expected(math.nan) == expected(due * (1 + 1e-9)) == ""
