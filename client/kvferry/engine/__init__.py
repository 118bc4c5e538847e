"""Connects an inference engine to kvferry: one port for its scheduler, and one for each of its workers.

    scheduler process                                        worker process, one per rank
    SchedulerPort ── Grant, local blocks ──(the engine)──►   WorkerPort.start
    SchedulerPort.grant_steps ── GrantStep ──(the engine)─►  WorkerPort.add_step
    SchedulerPort.collect ◄──(the engine)── WorkerOutput ──  WorkerPort.finished

Every call that an engine makes from its step returns at once (R11); threads of the ports wait instead. Grants, their
steps and worker outputs are plain values: they can be pickled, or encoded by their types, as msgspec does.
`docs/engines.md` is the guide.
"""

from kvferry._memory.rank_memory import Tails as Tails
from kvferry._reads.leased_read import ReadTimes as ReadTimes
from kvferry._reads.leased_read import ShareWork as ShareWork
from kvferry._wire.publication import Told as Told
from kvferry.engine.scheduler import SchedulerPort as SchedulerPort
from kvferry.engine.values import Finished as Finished
from kvferry.engine.values import Grant as Grant
from kvferry.engine.values import GrantStep as GrantStep
from kvferry.engine.values import Offer as Offer
from kvferry.engine.values import RankEnd as RankEnd
from kvferry.engine.values import ReadEnd as ReadEnd
from kvferry.engine.values import ReadSource as ReadSource
from kvferry.engine.values import SchedulerStats as SchedulerStats
from kvferry.engine.values import WorkerOutput as WorkerOutput
from kvferry.engine.worker import WorkerPort as WorkerPort
