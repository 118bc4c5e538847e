"""The parts of a KV cache: groups, planes of memory, the ranks' shares, and the blocks of a request. Values only.

`kvferry.geometry.tensors` makes planes from tensors, `formats` names the axes of common engines' tensors, and `file`
reads geometries from files.
"""

from kvferry.geometry.blocks import Blocks as Blocks
from kvferry.geometry.model import EngineGeometry as EngineGeometry
from kvferry.geometry.model import Group as Group
from kvferry.geometry.model import GroupKind as GroupKind
from kvferry.geometry.model import MemoryRegion as MemoryRegion
from kvferry.geometry.model import RankGeometry as RankGeometry
from kvferry.geometry.model import check_rank as check_rank
from kvferry.geometry.model import check_regions as check_regions
from kvferry.geometry.plane import Interval as Interval
from kvferry.geometry.plane import MemoryKind as MemoryKind
from kvferry.geometry.plane import Plane as Plane
from kvferry.geometry.plane import TokenShard as TokenShard
from kvferry.geometry.plane import shard as shard
from kvferry.geometry.plane import shards as shards
