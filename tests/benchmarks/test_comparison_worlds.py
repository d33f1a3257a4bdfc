"""Which sets settings may be chosen on, and which figures are reported on."""

from __future__ import annotations

import domain_study
import pytest
from comparison.worlds import real_kind

from cliquetta.errors import UnknownNameError


@pytest.mark.parametrize(
    ("id", "kind"),
    [
        ("edges/80", "dev"),
        ("cifar10-8@gaussian_noise:3", "dev"),
        ("cifar10-8/80@jpeg_compression:5", "dev"),
        ("cifar10-8@fog:3", "report"),
        ("silhouettes", "report"),
        ("pacs-photo", "clean"),
        ("pacs-photo@fog:3", "report"),
    ],
)
def test_role_of_a_real_set(id: str, kind: str) -> None:
    assert real_kind(id) == kind


def test_studies_look_at_development_sets_only() -> None:
    sets = {name for s in domain_study.REAL for name in (s.set, s.other) if name is not None}
    assert {real_kind(name) for name in sets} == {"dev"}


def test_parts_of_a_study_make_it_whole_and_unknown_streams_are_refused() -> None:
    parts = [domain_study.choose(domain_study.MICRO, "", f"{i}/3") for i in (1, 2, 3)]
    assert sorted(s.name for p in parts for s in p) == sorted(s.name for s in domain_study.MICRO)
    with pytest.raises(UnknownNameError, match="gauss3"):
        domain_study.choose(domain_study.MICRO, "gaus3", "1/1")
    with pytest.raises(SystemExit, match="4/3"):
        domain_study.choose(domain_study.MICRO, "", "4/3")
