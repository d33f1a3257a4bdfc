"""SCAP: supportive cliques, attribute prompts, retention and composed inference.

Zhang et al., "SCAP: Transductive Test-Time Adaptation via Supportive Clique-based
Attribute Prompting", CVPR 2025. Equation numbers in this package are the paper's,
counted from the top.
"""

from cliquetta.methods.scap.adapter import SCAP
from cliquetta.methods.scap.config import PRESETS, SCAPConfig

__all__ = ["PRESETS", "SCAP", "SCAPConfig"]
