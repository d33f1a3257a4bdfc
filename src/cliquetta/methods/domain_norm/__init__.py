"""SCAP with domains: visual LayerNorms per domain of the stream, learned and kept.

Ours, after Zhang et al., "SCAP: Transductive Test-Time Adaptation via Supportive Clique-based
Attribute Prompting", CVPR 2025. ``config`` has the settings, ``frequencies`` estimates which
classes occur, ``domains`` measures how far domains are apart, ``known_domains`` remembers them,
``learning`` holds the loss, ``voters`` the votes of similar images; ``adapter`` wires. Settings
were chosen on development streams: docs/research/domain-norm.md has the log.
"""

from cliquetta.methods.domain_norm.adapter import DomainNorm
from cliquetta.methods.domain_norm.config import DomainNormConfig

__all__ = ["DomainNorm", "DomainNormConfig"]
