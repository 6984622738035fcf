"""Planting replaces what is there while its context lasts, and refuses to plant nothing."""

from __future__ import annotations

import pytest
from planting import CannotPlant, instead, planting, replaced


class Sample:
    def method(self) -> str:
        return "plain"

    @classmethod
    def of(cls, value: int) -> str:
        return f"{cls.__name__} {value}"

    @staticmethod
    def fixed() -> str:
        return "fixed"


def skipped(result=None):
    return instead(lambda *_: result)


def louder(original, *args):
    return original(*args) + "!"


@pytest.mark.parametrize(
    ("name", "call", "sound"),
    [
        ("method", lambda: Sample().method(), "plain"),
        ("of", lambda: Sample.of(3), "Sample 3"),
        ("fixed", lambda: Sample.fixed(), "fixed"),
    ],
)
def test_methods_of_every_kind_are_replaced_and_put_back(name, call, sound):
    with replaced(Sample, name, instead(louder)):
        assert call() == f"{sound}!"
    assert call() == sound


def test_an_error_inside_puts_everything_back():
    with pytest.raises(KeyError), planting((Sample, "method", skipped("gone")), (Sample, "fixed", skipped("too")))():
        assert (Sample().method(), Sample.fixed()) == ("gone", "too")
        raise KeyError
    assert (Sample().method(), Sample.fixed()) == ("plain", "fixed")


def test_what_is_not_there_cannot_be_replaced():
    with pytest.raises(CannotPlant, match="renamed"), replaced(Sample, "renamed", skipped()):
        pass


def test_the_first_of_two_changes_is_undone_when_the_second_does_not_fit():
    with pytest.raises(CannotPlant), planting((Sample, "method", skipped()), (Sample, "renamed", skipped()))():
        pass
    assert Sample().method() == "plain"
