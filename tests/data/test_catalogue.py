"""Ids of datasets, and what the catalogue says of the bundled ones."""

import pytest

from cliquetta.data.catalogue import get_dataset, list_datasets
from cliquetta.errors import UserError


def test_bad_ids_are_explained() -> None:
    for id, message in (
        ("bundled@fogg:3", "'fog'"),
        ("bundled@fog:6", "1 to 5"),
        ("bundled@fog:x", "name:severity"),
    ):
        with pytest.raises(UserError, match=message):
            get_dataset(id)


def test_the_bundled_sets_are_what_the_catalogue_says() -> None:
    for entry in list_datasets():
        if not entry.needs_root:
            dataset = get_dataset(entry.id)
            assert len(dataset) == entry.expected["images"]
            assert len(dataset.names) == entry.classes
