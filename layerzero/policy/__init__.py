"""Policies as immutable values: what may run, what must run, and what is worth more or less than its cost.

Reading order: `rules` (one line), `policy` (the chain and its verdict), `load` (YAML, environment),
`program` (what calls ask for), `names` (do the names exist).
"""

from layerzero.policy.condition import Condition as Condition
from layerzero.policy.condition import parse_conditions as parse_conditions
from layerzero.policy.load import Loaded as Loaded
from layerzero.policy.load import environment_policy as environment_policy
from layerzero.policy.load import load_policy as load_policy
from layerzero.policy.load import parse_policy as parse_policy
from layerzero.policy.names import Finding as Finding
from layerzero.policy.names import check_names as check_names
from layerzero.policy.names import refuse_unknown as refuse_unknown
from layerzero.policy.policy import EMPTY as EMPTY
from layerzero.policy.policy import NO_BOOST as NO_BOOST
from layerzero.policy.policy import Active as Active
from layerzero.policy.policy import Policy as Policy
from layerzero.policy.policy import RequestPolicy as RequestPolicy
from layerzero.policy.policy import Verdict as Verdict
from layerzero.policy.policy import describe as describe
from layerzero.policy.policy import merge as merge
from layerzero.policy.program import disabling as disabling
from layerzero.policy.program import get_locks as get_locks
from layerzero.policy.program import lock as lock
from layerzero.policy.program import only as only
from layerzero.policy.program import preferring as preferring
from layerzero.policy.program import requesting as requesting
from layerzero.policy.program import unlock as unlock
from layerzero.policy.rules import Boost as Boost
from layerzero.policy.rules import Layer as Layer
from layerzero.policy.rules import Rule as Rule
from layerzero.policy.rules import make_rule as make_rule
