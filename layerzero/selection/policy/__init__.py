"""Policies as immutable values: what may run, what must run, and what is worth more or less than its cost.

Reading order: `rules` (one line), `policy` (the chain and its verdict), `load` (YAML, environment),
`program` (what calls ask for), `names` (do the names exist).
"""

from layerzero.selection.policy.load import environment_policy as environment_policy
from layerzero.selection.policy.load import load_policy as load_policy
from layerzero.selection.policy.load import parse_policy as parse_policy
from layerzero.selection.policy.names import check_names as check_names
from layerzero.selection.policy.policy import EMPTY as EMPTY
from layerzero.selection.policy.policy import Policy as Policy
from layerzero.selection.policy.policy import merge as merge
from layerzero.selection.policy.program import allow_only as allow_only
from layerzero.selection.policy.program import exclusion as exclusion
from layerzero.selection.policy.program import get_locks as get_locks
from layerzero.selection.policy.program import lock as lock
from layerzero.selection.policy.program import preference as preference
from layerzero.selection.policy.program import request_lock as request_lock
from layerzero.selection.policy.program import unlock as unlock
from layerzero.selection.policy.rules import Layer as Layer
from layerzero.selection.policy.rules import make_rule as make_rule
