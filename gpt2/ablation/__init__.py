"""Ablation studies. A study is a list of steps; a step sets Kconfig symbols on top of its parent."""

from gpt2.ablation.mechanisms import MECHANISMS
from gpt2.ablation.nsa import NSA
from gpt2.ablation.ratio import RATIO
from gpt2.ablation.step import Study

# The keys are the members of the Kconfig choice ABLATION_STUDY.
STUDIES: dict[str, Study] = {study.name: study for study in (RATIO, MECHANISMS, NSA)}
