"""LayerNorms and class prior per domain of the stream.

Ours; it grew out of SCAP (Zhang et al., CVPR 2025), whose cliques and prompts it
replaced by domains and LayerNorms. docs/methods/domain_norm.md has the equations,
docs/research/domain-norm.md the log. ``step`` reads like the algorithm there; ``state``
is what it goes from and to; ``domains`` and ``prior`` hold its parts; ``health`` its
figures; ``merging`` joins the states of several copies.
"""

from cliquetta.methods.domain_norm.adapter import DomainNorm
from cliquetta.methods.domain_norm.config import DomainNormConfig

__all__ = ["DomainNorm", "DomainNormConfig"]
