"""The garbage collector is left as it was found, whatever happens in between."""

from __future__ import annotations

import gc

import pytest

from humming_convert.collector import paused, resumed


def fails_inside() -> None:
    with paused():
        assert not gc.isenabled()
        with resumed():
            assert gc.isenabled()
            assert gc.get_freeze_count() > 1000
            raise KeyError("inside")


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_then_on_for_what_is_new_then_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError, match="inside"):
            fails_inside()
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if before else gc.disable)()
