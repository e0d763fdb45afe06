"""Ablation studies: each a list of steps, each step a change to its parent in Kconfig terms."""

from gpt2.ablation.mechanisms import MECHANISMS
from gpt2.ablation.nsa import NSA
from gpt2.ablation.ratio import RATIO
from gpt2.ablation.step import Study

# Keys are the members of the choice ABLATION_STUDY.
STUDIES: dict[str, Study] = {study.name: study for study in (RATIO, MECHANISMS, NSA)}
