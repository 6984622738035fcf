"""Workers of one session share the devices: disjointly while there are enough, evenly when there are not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_testing.backends.devices import Share, devices_for, share_from


@given(size=st.integers(1, 16), devices=st.integers(1, 64), count=st.integers(1, 16))
def test_devices_of_all_workers(size: int, devices: int, count: int) -> None:
    worlds = [devices_for(size, devices, Share(index, count)) for index in range(count)]
    for world in worlds:
        assert len(world) == size
        assert all(0 <= device < devices for device in world)
        if size <= devices:
            assert len(set(world)) == size
    if size * count <= devices:
        used = [device for world in worlds for device in world]
        assert len(set(used)) == len(used)


@given(devices=st.integers(1, 8), count=st.integers(1, 8))
def test_overlap_is_even(devices: int, count: int) -> None:
    used = [device for index in range(count) for device in devices_for(1, devices, Share(index, count))]
    most = max(used.count(device) for device in range(devices))
    assert most <= -(-count // devices)


def test_worlds_of_different_sizes_stay_in_the_workers_part() -> None:
    for size in (1, 2, 4):
        assert set(devices_for(size, 8, Share(1, 2))) <= {4, 5, 6, 7}


def test_no_device_at_all() -> None:
    assert devices_for(3, 0, Share()) == (0, 0, 0)


def test_what_xdist_says() -> None:
    assert share_from("gw3", "8") == Share(3, 8)
    assert share_from(None, None) == Share()
    assert share_from("master", "8") == Share()
    assert share_from("gw1", "many") == Share()
    assert share_from("gw1", "0") == Share()
    assert share_from("gw9", "4") == Share(1, 4)
