"""Links used by the process groups of a mesh, and the time of their collectives."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from trainctl.hardware import Hardware
from trainctl.plan.types import Mesh
from trainctl.search import constants


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Process group with its bandwidth."""

    ranks: int
    bandwidth: float
    """Bytes per second that each rank sends in a ring over all ranks."""
    on_a_machine: int
    """Number of ranks on one machine."""


class Links:
    """Process groups of a mesh on given machines, and the time of their collectives.

    Rank order is tensor fastest, then sequence, data and pipeline (`Mesh`), and machines are filled
    in this order. A ring over several machines enters and leaves each one through the network cards
    of all its members there, so the members on a machine share the traffic. ZeRO partitions over
    the group `zero`, the data and sequence ranks. The group `pipeline` is a chain of neighbouring
    stages.
    """

    def __init__(self, hardware: Hardware, mesh: Mesh) -> None:
        share = constants.LINK_SHARE * constants.GIGA
        link = hardware.device_link_gb_per_second or constants.ASSUMED_LINK_GB_PER_SECOND
        network = hardware.network_gb_per_second or constants.ASSUMED_NETWORK_GB_PER_SECOND
        host = hardware.host_link_gb_per_second or constants.ASSUMED_HOST_LINK_GB_PER_SECOND
        self._link = link * share
        self._network = network * constants.NETWORK_SHARE * constants.GIGA
        self._host = host * constants.HOST_LINK_SHARE * constants.GIGA
        self._node = hardware.devices_per_node
        self._nodes = hardware.nodes
        inner = mesh.tensor * mesh.sequence
        self.tensor = self._group(mesh.tensor, 1)
        self.sequence = self._group(mesh.sequence, mesh.tensor)
        self.zero = self._group(mesh.data * mesh.sequence, mesh.tensor)
        self.pipeline = self._group(mesh.pipeline, inner * mesh.data)

    def near(self, ranks: int) -> RankGroup:
        """Return a group of neighbouring devices on one machine."""
        return RankGroup(ranks, self._link, ranks)

    def all_gather(self, size: float, group: RankGroup) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, of `size` bytes in total."""
        if group.ranks == 1:
            return 0.0
        share = (group.ranks - 1) / group.ranks
        return share * size / group.bandwidth + self._latency(group)

    def all_reduce(self, size: float, group: RankGroup) -> float:
        """Return the seconds of an all-reduce of `size` bytes: reduce-scatter plus all-gather."""
        return 2 * self.all_gather(size, group)

    def all_to_all(self, size: float, group: RankGroup) -> float:
        """Return the seconds of an all-to-all of `size` bytes per rank.

        Traffic inside a machine uses the device links, and at the same time traffic between
        machines uses the network.
        """
        if group.ranks == 1:
            return 0.0
        near = (group.on_a_machine - 1) / group.ranks * size / self._link
        far = (group.ranks - group.on_a_machine) / group.ranks * size / self._network
        return max(near, far) + self._latency(group)

    def send(self, size: float, group: RankGroup) -> float:
        """Return the seconds to send `size` bytes to the next stage; each pair has its own
        cards.
        """
        stage_is_inside = self._nodes == 1
        return size / (self._link if stage_is_inside else self._network)

    def from_host(self, size: float) -> float:
        """Return the seconds to copy `size` bytes between a device and its host."""
        return size / self._host

    def _group(self, ranks: int, stride: int) -> RankGroup:
        """Return the group of `ranks` ranks with the stride `stride`."""
        members = max(1, min(ranks, self._node // stride))
        if members >= ranks:
            return RankGroup(ranks, self._link, ranks)
        return RankGroup(ranks, min(self._link, members * self._network), members)

    def _latency(self, group: RankGroup) -> float:
        return constants.COLLECTIVE_LATENCY * ceil(log2(group.ranks))
