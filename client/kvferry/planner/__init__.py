"""The reads of each rank: from two geometries and a request's blocks to descriptors. Pure: no I/O, no clock.

`plan_read` plans the reads of one destination rank, `diff` names how two engines differ, and `explain`, `to_text`,
`to_json` and `to_svg` show a plan.
"""

from kvferry.planner.coverage import diff as diff
from kvferry.planner.explain import ReadLine as ReadLine
from kvferry.planner.explain import explain as explain
from kvferry.planner.explain import to_json as to_json
from kvferry.planner.explain import to_text as to_text
from kvferry.planner.explain_svg import to_svg as to_svg
from kvferry.planner.path_choice import Costs as Costs
from kvferry.planner.path_choice import Path as Path
from kvferry.planner.path_choice import PathRule as PathRule
from kvferry.planner.plan import ReadPlan as ReadPlan
from kvferry.planner.plan import plan_read as plan_read
