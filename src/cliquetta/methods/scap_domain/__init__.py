"""SCAP with domain prompts: a visual attribute prompt per domain of the stream, kept and moved.

Ours, after Zhang et al., "SCAP: Transductive Test-Time Adaptation via Supportive Clique-based
Attribute Prompting", CVPR 2025. ``config`` has the settings, ``presence`` estimates which classes
occur, ``domains`` tells domains apart, ``learning`` holds loss and votes, ``adapter`` wires and
remembers. Settings were chosen on development streams: docs/research/domain-prompt.md has the log.
"""

from cliquetta.methods.scap_domain.adapter import DomainSCAP
from cliquetta.methods.scap_domain.config import DomainSCAPConfig

__all__ = ["DomainSCAP", "DomainSCAPConfig"]
