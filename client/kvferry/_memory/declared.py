"""The memory that a rank registers, and the part of the model that it declares this memory to hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from kvferry._arguments import described, flag, several
from kvferry._engine_spec import EngineSpec
from kvferry._memory.device import check_stable
from kvferry._memory.rank_memory import RankMemory
from kvferry.errors import InvalidField
from kvferry.geometry.model import MemoryRegion, RankGeometry
from kvferry.geometry.plane import ADDRESS_LIMIT, Interval, MemoryKind, Plane
from kvferry.geometry.tensors import Holding, Tensor, heads_held, held, named_tensors, planes_of, regions_of

MAPS = Path("/proc/self/maps")
ONE_OF = "one of heads, holding with its units, and replicated=True"


@dataclass(frozen=True)
class Declared:
    """The arguments of `Client.register_cache` and of `WorkerPort` about a rank's memory, beside its tensors.

    Describe the memory in one of three ways: by the tensors and the names of their `axes`, for an engine of one group;
    by the tensors and the `planes` that `kvferry.geometry.formats` makes of them; or by `planes` and the `regions` of
    memory that they lie in.

    Attributes:
        axes: names of the tensors' axes, e.g. ``("kv", "block", "head", "token", "content")``; None: unknown, so that
            only whole pages can be read.
        heads, total_heads: the KV heads that the tensors hold, and the number in the model: ``range(2, 4)`` of 4.
        holding: the contents of the tensors in detail: heads or other units, tokens, and where they may be cut.
        replicated: every rank that has these layers holds all of their heads. An engine of several ranks must give one
            of `heads`, `holding` (with its `units`) and `replicated`: ranks that declare the same heads count as
            replicas, and a reader reads some blocks from one replica and some from another. Required with `planes` if a
            plane holds its whole axis.
        planes: the planes that the rank holds.
        regions: the regions of memory that the planes lie in.
        keep: an object to keep referenced as long as the cache.
        labels: for people and tools, such as tp_rank and pp_rank.
        serve: whether other ranks may read this cache. False saves one NIXL agent.
    """

    _: KW_ONLY
    axes: Sequence[str] | None = None
    heads: range | Interval | None = None
    total_heads: int | None = None
    holding: Holding | None = None
    replicated: bool = False
    planes: Sequence[Plane] | None = None
    regions: Sequence[MemoryRegion] | None = None
    keep: object = None
    labels: Mapping[str, int] | None = None
    serve: bool = True

    def __post_init__(self) -> None:
        flag("replicated", self.replicated)
        flag("serve", self.serve)

    def of_tensors(self, num_ranks: int) -> Holding | None:
        """What the rank's tensors hold; None: the whole model. Raises `InvalidField` if the heads are declared in two
        ways, or, in an engine of several ranks, in none."""
        if self.heads is None and self.total_heads is not None:
            raise InvalidField("heads", None, "the heads that this rank holds of total_heads")
        said = {"heads": self.heads is not None, "holding": self.holding is not None, "replicated": self.replicated}
        given = [name for name, is_given in said.items() if is_given]
        if len(given) > 1:
            raise InvalidField(given[1], "given", f"it to be left out, because {given[0]} is given: pass {ONE_OF}")
        if self.holding is not None and not isinstance(self.holding, Holding):
            raise InvalidField("holding", described(self.holding), "a Holding")
        if num_ranks > 1:
            which = f"which heads this rank of {num_ranks} holds"
            if not given:
                raise InvalidField("heads", None, f"{which}: {ONE_OF} (every rank has all heads)")
            if self.holding is not None and (self.holding.units is None or self.holding.axis_size is None):
                units = self.holding.units, self.holding.axis_size
                raise InvalidField("holding.units", units, f"units and axis_size: {which}")
        return self.holding if self.heads is None else heads_held(self.heads, self.total_heads)

    def check_planes(self, num_ranks: int, planes: Sequence[Plane]) -> None:
        """Raise `InvalidField` if planes hold a whole axis on one rank of several, and `replicated` is not set. Such
        planes were probably made without units, on every rank, by mistake."""
        for name in ("heads", "total_heads", "holding"):
            if getattr(self, name) is not None:
                raise InvalidField(name, described(getattr(self, name)), "None, because the planes say what they hold")
        if num_ranks == 1 or self.replicated:
            return
        for plane in planes:
            if len(plane.units) == plane.axis_size and plane.token_shard.count == 1:
                raise InvalidField(
                    "replicated",
                    False,
                    f"True if every rank of {num_ranks} that has plane {plane.name} holds all of its {plane.axis_size} "
                    "units, else planes that say which of them they hold",
                )


def describe(
    engine: EngineSpec, rank: int, tensors: Mapping[str, Tensor] | None, declared: Declared
) -> tuple[RankGeometry, RankMemory]:
    """A rank's geometry and memory, from its tensors or from the planes and regions that are given. Raises the errors
    of `Client.register_cache`."""
    if tensors is not None:
        # Keeps the memory alive even if the caller changes its mapping or drops its tensors.
        tensors = {name: held(tensor) for name, tensor in named_tensors(tensors).items()}
    axes, planes, regions = declared.axes, declared.planes, declared.regions
    found: tuple[Plane, ...]
    if planes is not None:
        found = several("planes", planes, Plane, "several Planes")
        if axes is not None:
            raise InvalidField("axes", described(axes), "None, because the planes say what the tensors hold")
        declared.check_planes(engine.num_ranks, found)
    if tensors is None:
        if planes is None or regions is None:
            raise InvalidField("planes", described(planes), "tensors, or planes with the regions that they lie in")
        ranges = several("regions", regions, MemoryRegion, "several MemoryRegions")
    else:
        if regions is not None:
            raise InvalidField("regions", described(regions), "None, because the tensors say where they lie")
        if planes is None:
            if len(engine.groups) != 1:
                names = [group.name for group in engine.groups]
                raise InvalidField("planes", None, f"planes, which say which of the groups {names} they belong to")
            found = planes_of(tensors, axes, engine.groups[0], holding=declared.of_tensors(engine.num_ranks))
        ranges = regions_of(tensors.values())
    check_mapped(ranges, found)
    check_stable(ranges)
    labels = {} if declared.labels is None else declared.labels
    memory = RankMemory(ranges, tuple((tensors or {}).values()), keep=(tensors, _kept(declared.keep)))
    return RankGeometry(rank, found, labels), memory


def _kept(keep: object) -> object:
    """The object to keep referenced; of a container, a copy with its present contents."""
    if isinstance(keep, Mapping):
        return dict(keep)
    return tuple(keep) if isinstance(keep, (list, set)) else keep


def check_mapped(regions: Iterable[MemoryRegion], planes: Iterable[Plane]) -> None:
    """Raise `InvalidField`, naming a plane, for host memory that is not mapped readable and writable in this process.
    Device memory is not checked, nor is any memory on systems without ``/proc/self/maps``.

    NIXL registers any address, and the first read into a page that is not mapped, or is read-only, fails halfway or
    kills the process. Memory that is only read has to be writable as well: NIXL registers all memory for remote reads
    and writes, and devices that pin pages refuse read-only pages.
    """
    host = [region for region in regions if region.memory_kind is MemoryKind.DRAM]
    usable = _usable() if host else None
    if usable is None:
        return
    for region in host:
        first, last = region.base, region.base + region.length
        at = bisect_right(usable, (first, ADDRESS_LIMIT)) - 1
        if at < 0 or last > usable[at][1]:
            within = next((plane.name for plane in planes if region.holds(plane)), "")
            name = f"memory of plane {within}" if within else "regions"
            raise InvalidField(name, f"[{first:#x}, {last:#x})", "memory of this process, mapped and writable")


def _usable() -> list[tuple[int, int]] | None:
    """Ranges of memory that may be read and written, rising, neighbours joined; None where the system has no map."""
    try:
        # Read as bytes: the names of mapped files may contain any byte but a newline.
        lines = MAPS.read_bytes().split(b"\n")
    except OSError:
        return None
    found: list[tuple[int, int]] = []
    for line in lines:
        addresses, _, rest = line.partition(b" ")
        if rest.startswith(b"rw"):
            first, last = (int(address, 16) for address in addresses.split(b"-"))
            # A range that grows while the list is read may occur twice.
            if found and first <= found[-1][1]:
                found[-1] = found[-1][0], max(last, found[-1][1])
            else:
                found.append((first, last))
    return found
