"""The communicator of a rank that is alone: every collective is already done."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runtime.torch_tp.communicators.interface import Done, GroupSettings


class SerialCommunicator:
    """Size 1: sums of one part are the part itself."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        return

    def start_all_reduce(self, tensor: Tensor) -> Done[None]:
        return Done(None)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        if sends or receives:
            raise ValueError(f"a rank alone has no peers, yet exchange got {len(sends)} sends and {len(receives)} receives")

    def close(self) -> None:
        return


def build(settings: GroupSettings) -> SerialCommunicator:
    """For `build_communicator`. Raises ValueError when the group has more than this rank."""
    if len(settings.members) != 1:
        raise ValueError(f"members={settings.members}: a serial communicator is for one rank alone")
    return SerialCommunicator()
