"""The devices of servers that a run starts: none of the learner's, none twice, also below a mask of the run."""

import pytest

from condensegrpo.core.errors import SamplerError
from condensegrpo.samplers.vllm.settings import ServerSettings
from condensegrpo.samplers.vllm_server.process import devices_of, server_devices, visible_devices

EIGHT = tuple("01234567")
UUIDS = tuple(f"GPU-{letter * 8}" for letter in "abcd")


@pytest.mark.parametrize(
    ("visible", "ranks", "replicas", "each", "wanted"),
    [
        ((), 2, 1, 1, [(None,), (None,)]),  # a CPU
        (("0",), 1, 1, 1, [(None,)]),  # one device: learner and server share it
        (("0", "1"), 1, 1, 1, [("1",)]),
        (EIGHT, 1, 3, 2, [("1,2", "3,4", "5,6")]),
        (EIGHT, 4, 1, 1, [("4",), ("5",), ("6",), ("7",)]),
        (EIGHT, 2, 1, 3, [("2,3,4",), ("5,6,7",)]),
        (EIGHT, 2, 3, 1, [("2", "3", "4"), ("5", "6", "7")]),
        (("4", "6", "7", "2"), 2, 1, 1, [("7",), ("2",)]),  # a mask of the run
        (UUIDS, 2, 1, 1, [(UUIDS[2],), (UUIDS[3],)]),
    ],
)
def test_servers_get_the_devices_behind_those_of_the_ranks(
    visible: tuple[str, ...], ranks: int, replicas: int, each: int, wanted: list[tuple[str | None, ...]]
) -> None:
    found = [server_devices(visible, ranks=ranks, rank=n, replicas=replicas, each=each) for n in range(ranks)]
    assert found == wanted


@pytest.mark.parametrize(
    ("visible", "ranks", "replicas", "each", "needed"),
    [
        (EIGHT, 8, 1, 1, 16),
        (("0",), 1, 2, 1, 3),
        (("3",), 4, 1, 1, 8),  # a launcher that shows every task one device
        (("0", "1"), 1, 1, 2, 3),
    ],
)
def test_too_few_devices_are_an_error_with_the_numbers(
    visible: tuple[str, ...], ranks: int, replicas: int, each: int, needed: int
) -> None:
    with pytest.raises(SamplerError, match=rf"found {len(visible)} devices .*, wanted {needed}: {ranks} for the"):
        server_devices(visible, ranks=ranks, rank=0, replicas=replicas, each=each)


@pytest.mark.parametrize(
    ("mask", "count", "wanted"),
    [
        (None, 2, ("0", "1")),
        ("4, 6", 2, ("4", "6")),
        ("0,-1,1", 1, ("0",)),
        ("", 0, ()),
        (",".join(UUIDS), 4, UUIDS),
        ("MIG-1234", 1, ("MIG-1234",)),
    ],
)
def test_devices_are_named_as_the_mask_of_the_run_names_them(
    mask: str | None, count: int, wanted: tuple[str, ...]
) -> None:
    assert visible_devices(mask, count) == wanted


def test_devices_that_are_set_are_taken_as_they_are() -> None:
    assert devices_of(ServerSettings(devices=("0", "0")), 2) == ("0", "0")
