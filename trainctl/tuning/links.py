"""Time of collectives, from the bandwidths of the links in their rings."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from trainctl.hardware import Hardware
from trainctl.plans.types import Mesh
from trainctl.tuning.rates import (
    ASSUMED_HOST_LINK_GB_PER_SECOND,
    ASSUMED_LINK_GB_PER_SECOND,
    ASSUMED_NETWORK_GB_PER_SECOND,
    COLLECTIVE_LATENCY,
    GIGA,
    HOST_LINK_SHARE,
    LINK_SHARE,
    NETWORK_SHARE,
)


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

    Rank order is tensor fastest, then sequence, context, data and pipeline (`Mesh`), and machines
    are filled in this order. A ring over several machines enters and leaves each one through the
    network cards of all its members there, so the members on a machine share the traffic. ZeRO
    partitions over the group `zero`, the data, context and sequence ranks or with HSDP a shard
    group of them, and experts over `expert_replicas`. The group `copies` is the ranks with the same
    HSDP shard, `stage` all ranks of a pipeline stage, and `pipeline` a chain of neighbouring
    stages.

    Args:
        shard_ranks: Size of an HSDP shard group; by default all replicas are one.
    """

    def __init__(self, hardware: Hardware, mesh: Mesh, shard_ranks: int | None = None) -> None:
        share = LINK_SHARE * GIGA
        link = hardware.device_link_gb_per_second or ASSUMED_LINK_GB_PER_SECOND
        network = hardware.network_gb_per_second or ASSUMED_NETWORK_GB_PER_SECOND
        host = hardware.host_link_gb_per_second or ASSUMED_HOST_LINK_GB_PER_SECOND
        self._link = link * share
        self._network = network * NETWORK_SHARE * GIGA
        self._host = host * HOST_LINK_SHARE * GIGA
        self._node = hardware.devices_per_node
        self._nodes = hardware.nodes
        inner = mesh.tensor * mesh.sequence_parts
        # Expert ranks are neighbours in the data axis; replicas of an expert lie that far apart.
        apart = mesh.tensor * mesh.expert
        self.tensor = self._group(mesh.tensor, 1)
        self.sequence = self._group(mesh.sequence, mesh.tensor)
        self.context = self._group(mesh.context, mesh.tensor * mesh.sequence)
        replicas = mesh.replicas
        shard_ranks = shard_ranks or replicas
        self.zero = self._group(shard_ranks, mesh.tensor)
        self.copies = self._group(replicas // shard_ranks, mesh.tensor * shard_ranks)
        self.expert = self._group(mesh.expert_ranks, 1)
        self.expert_replicas = self._group(mesh.expert_replicas, apart)
        self.stage = self._group(inner * mesh.data, 1)
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

    def pass_on(self, size: float, group: RankGroup) -> float:
        """Return the seconds in which each rank sends `size` bytes to the next one in a ring.

        Between machines a message takes the network card of its sender, and the others wait for it.
        """
        is_inside = group.on_a_machine == group.ranks
        return size / (self._link if is_inside else self._network) + COLLECTIVE_LATENCY

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
        return COLLECTIVE_LATENCY * ceil(log2(group.ranks))
