"""Optimizer and pruner follow the documented formulas, in the traced run and on given gradients.

A driven run (``DrivenRun``) puts chosen gradients through the trainer, on a few parameters in
float64, so that every part of the rules acts within 26 steps. It is compared with
``lib/optim/reference.py`` and ``lib/pruning/reference.py``; the traced run shows to which parameters of the step
the rules apply.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from gpt2.check.finding import CheckFinding, compare, expect
from gpt2.check.short_run import (
    CLIPPED_STEPS,
    DrivenRun,
    driven_config,
    driving_gradients,
)
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.mlp.gate import MlpAttnGate
from gpt2.nsa.module import BranchGates
from gpt2.training.state import TrainingSession
from lib.optim.reference import AdamwspamReference, optimizer_reference
from lib.optim.schedule import ScheduleOptions
from lib.pruning.layers import NeverPruned
from lib.pruning.options import PruningOptions
from lib.pruning.pruners import MaskPruner
from lib.pruning.reference import (
    REFERENCES,
    PruningSnapshot,
    lowest,
    ramp_sparsity,
    scope_sparsities,
)
from lib.units import first_of

# Fields of an optimizer's options with the same name in torch's parameter groups.
_GROUP_OPTIONS = ("eps", "momentum", "dampening", "nesterov")

Weights = dict[str, list[float]]


def reference_learning_rate(options: ScheduleOptions, step: float, steps: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    ``steps`` is the budget in iterations.
    """
    peak, low, warmup = options.learning_rate, options.min_learning_rate, options.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    x = (step - warmup) / (steps - warmup)
    match options.kind:
        case "constant":
            return peak
        case "linear":
            return low * x + peak * (1 - x)
        case "cosine":
            return low + (peak - low) * math.cos(math.pi * x / 2) ** 2
        case "wsd":
            return low + (peak - low) * min(1.0, (1 - x) / options.wsd_decay_fraction)
    raise ValueError(f"unknown schedule {options.kind!r}")


def check_optimized(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the optimizer's settings in the traced run, and its updates in the driven run.

    Parameter groups match the options, and only matrices decay. A gate's matrices decay like all
    others, although they are never pruned.
    """
    findings, subject.facts["optimized"] = _driven(subject, prunes=False)
    options = vars(subject.small.optimizer.rule)
    expected = {name: options[name] for name in _GROUP_OPTIONS if name in options}
    if "beta1" in options:
        expected["betas"] = (options["beta1"], options["beta2"])
    state, settings = subject.traced_run.run.session, list[CheckFinding]()
    tables = {id(t.weight) for t in (state.model.wte, state.model.wpe) if t is not None}
    for group in state.optimizer.param_groups:
        for name, value in expected.items():
            settings += compare(
                "optimizer-setting", f"an optimizer with {name}", group[name], value
            )
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            decay = options["weight_decay"] * (parameter.ndim >= 2 and id(parameter) not in tables)
            what = f"for {name} a weight decay of"
            settings += compare("weight-decay", what, group["weight_decay"], decay)
    return settings + findings


def _driven(
    subject: StepUnderTest, *, prunes: bool
) -> tuple[list[CheckFinding], Mapping[str, Any]]:
    """Return findings of the driven run, and how often each part of its rule acted.

    Steps with equal settings share them.
    """
    config = driven_config(subject.small_exact, subject.config)

    def drive() -> tuple[list[CheckFinding], Mapping[str, Any]]:
        run = _Drive(subject.traced_run.run.session, config, prunes=prunes)
        return run.compare(), run.exercised()

    pruning = config.pruning if prunes else config.pruning.stretch
    key = ("driven", prunes, config.train, config.schedule, config.optimizer, pruning)
    return subject.context.once(key, drive)


# The driven run: prescribed gradients, and an independent simulation of the trainer's step.


# The run is resumed after this step: in a warm-up after a reset, and between two prunings.
_RESUMED_AFTER = 12
# torch divides GRAD_CLIP by the norm plus this number.
_CLIP_EPS = 1e-6
_DRIVEN_TOLERANCE = 1e-9
_DRIVEN_ROUNDING = 1e-13
_DECAYING = ("first.weight", "second.weight", "gate.weight")
_PRUNABLE = ("first.weight", "second.weight")
_EMBEDDING = "wte.weight"


class _Drive:
    """A driven run and its simulation: every tensor of a step as flat lists, by position."""

    def __init__(self, template: TrainingSession, config: Config, *, prunes: bool) -> None:
        self.config, self._template, self._prunes = config, template, prunes
        self.run = DrivenRun(template, config, prunes=prunes)
        self.names = [name for name, _ in self.run.model.named_parameters()]
        self.rule: Any = self.config.optimizer.rule
        weights = self.run.weights()
        self.start = {name: list(values) for name, values in weights.items()}
        self.decays = [self.rule.weight_decay if n in _DECAYING else 0.0 for n in self.names]
        self.reference: Any = optimizer_reference(
            self.rule, [weights[n] for n in self.names], self.decays
        )
        self.alive = [[True] * len(weights[name]) for name in self.names]
        self.history: list[tuple[list[list[float]], list[list[float]]]] = []
        self.reached = 0.0
        self.clipped = 0
        # Scores after the last pruning, by matrix.
        self.scores: dict[str, list[float]] = {}

    def compare(self) -> list[CheckFinding]:
        """Return the first difference between the run and its simulation."""
        iterations = self.run.session.budget.iterations
        gradients = driving_gradients(self.run.model, self.rule, self.config.train.grad_clip)
        for step, tensors in enumerate(itertools.islice(gradients, iterations), 1):
            self.run.step(tensors)
            self._simulate([tensors[n].flatten().tolist() for n in self.names], step, iterations)
            findings = self._differences(step, iterations)
            if findings:
                return findings
            if step == _RESUMED_AFTER:
                resumed = DrivenRun(self._template, self.config, prunes=self._prunes)
                resumed.resume_from(self.run)
                self.run = resumed
        return []

    def exercised(self) -> dict[str, Any]:
        """Return how often each part of the rule acted."""
        facts: dict[str, Any] = {"steps above GRAD_CLIP": self.clipped}
        if isinstance(self.reference, AdamwspamReference):
            interval = self.reference.options.interval
            facts |= {
                "spikes": len(self.reference.spikes),
                "clipped elements": len(self.reference.clipped),
                "resets": (self.reference.n - 1) // interval,
            }
        return facts

    def _simulate(self, gradients: list[list[float]], step: int, iterations: int) -> None:
        """Mask, measure, clip, update and prune, as documented."""
        masked = [
            [g if alive else 0.0 for g, alive in zip(*pair, strict=True)]
            for pair in zip(gradients, self.alive, strict=True)
        ]
        norm = math.sqrt(sum(g * g for flat in masked for g in flat))
        self.history.append((masked, [list(flat) for flat in self.reference.parameters]))
        clip, share = self.config.train.grad_clip, 1.0
        if clip and norm > clip:
            share = clip / (norm + _CLIP_EPS)
            self.clipped += 1
        lr = reference_learning_rate(self.config.schedule, step - 1, iterations)
        self.reference.step([[g * share for g in flat] for flat in masked], lr, norm)
        options, progress = self.config.pruning, step / iterations
        if self._prunes and isinstance(options, PruningOptions):
            if progress >= options.ramp_end:
                due = self.reached < options.target
            else:
                due = progress > options.warmup and step % options.frequency == 0
            if due:
                self.reached = ramp_sparsity(options, progress)
                self._prune(options)

    def _prune(self, options: PruningOptions) -> None:
        embeddings = (_EMBEDDING,) if options.include_embeddings else ()
        prunable = [n for n in self.names if n in (*embeddings, *_PRUNABLE)]
        tensors = {self.names.index(name): self._scores(options, name) for name in prunable}
        keys, sizes = list(tensors), [len(scores) for scores in tensors.values()]
        for members, sparsity in scope_sparsities(options, self.reached, sizes):
            scope = {keys[i]: tensors[keys[i]] for i in members}
            for k, i in lowest(scope, sparsity):
                self.alive[k][i] = False
                self.reference.parameters[k][i] = 0.0
                self.reference.forget(k, i)
        self.scores = {name: self._scores(options, name) for name in prunable}

    def _scores(self, options: PruningOptions, name: str) -> list[float]:
        """Return the scores of the used rows of a matrix, minus infinity for pruned weights."""
        k, reference = self.names.index(name), self.reference
        used = self.run.model.wte.used_rows * 3 if name == _EMBEDDING else None
        history = [(gradients[k], weights[k]) for gradients, weights in self.history]
        moments: dict[str, Any] = {}
        if "beta1" in vars(self.rule):
            correction = 1.0 - self.rule.beta1**reference.t
            moments = {"m": reference.m[k], "v": reference.v[k], "bias_correction": correction}
        seen = PruningSnapshot(reference.parameters[k], history, **moments)
        scores = REFERENCES[type(options)](options, seen)
        return np.where(self.alive[k], scores, -math.inf)[:used].tolist()

    def _differences(self, step: int, iterations: int) -> list[CheckFinding]:
        actual = self.run.weights()
        expected = dict(zip(self.names, self.reference.parameters, strict=True))
        if self._prunes:
            findings = self._zeros(actual, expected, f"at step {step} of {iterations}")
            if findings := findings or self._wrong_scores():
                return findings
        for name, values in expected.items():
            pairs = list(zip(values, actual[name], strict=True))
            change = max(abs(e - s) for e, s in zip(values, self.start[name], strict=True))
            bound = _DRIVEN_TOLERANCE * change + _DRIVEN_ROUNDING * max(map(abs, values))
            error = max(abs(e - a) for e, a in pairs)
            if not error <= bound:
                text = f"the update of {self.rule.name} at step {step}{self._events(step)}"
                kind = "a matrix" if name in _DECAYING else "an embedding" if "wte" in name else ""
                text += f" of {kind or 'a vector'} with given gradients"
                return [CheckFinding("driven-update", text, f"weights that differ by {error:.1e}")]
        return []

    def _events(self, step: int) -> str:
        """Describe what the rule does at a step."""
        events = []
        if isinstance(self.reference, AdamwspamReference):
            if step > self.reference.options.interval:
                events.append(f"step {self.reference.t} after a reset")
            events += ["spike"] if step in self.reference.spikes else []
            clipped = sum(n == step for n, _, _ in self.reference.clipped)
            events += [f"{clipped} elements clipped"] if clipped else []
        if step in CLIPPED_STEPS:
            events.append("norm above GRAD_CLIP")
        if step == _RESUMED_AFTER + 1:
            events.append("resumed")
        return f" ({', '.join(events)})" if events else ""

    def _wrong_scores(self) -> list[CheckFinding]:
        """Compare the scores of remaining weights after a pruning, in fp32."""
        expected_scores, self.scores = self.scores, {}
        state, pruner = self.run.session, self.run.session.pruner
        what = f"a score by the formula of {self.config.pruning.summary}:"
        for name, expected in expected_scores.items():
            assert isinstance(pruner, MaskPruner)
            actual = pruner.score(name, state.optimizer).flatten().tolist()
            largest = max((abs(s) for s in expected if s > -math.inf), default=0.0)
            for score, value in zip(expected, actual, strict=False):
                if score > -math.inf and abs(score - value) > _TIE_TOLERANCE * largest:
                    return compare("pruning-score", what, value, score)
        return []

    def _zeros(self, actual: Weights, expected: Weights, at: str) -> list[CheckFinding]:
        """Compare which weights are zero."""
        zeros, expected_zeros = (
            {(n, i) for n, flat in weights.items() for i, w in enumerate(flat) if w == 0.0}
            for weights in (actual, expected)
        )
        pruner, found = self.config.pruning.name, f"{len(zeros)} zeros"
        others = {n for n, _ in zeros - expected_zeros} - {*_PRUNABLE, _EMBEDDING}
        ramp = f"{len(expected_zeros)} zeros {at}, by ramp, frequency and scope of {pruner}"
        order = f"the lowest scores of {pruner} are pruned {at}"
        return (
            expect(not others, "unpruned-parameter", "pruning of matrices alone", f"of {others}")
            or expect(len(zeros) == len(expected_zeros), "sparsity-ramp", ramp, found)
            or expect(zeros == expected_zeros, "pruning-order", order, "other weights are zero")
        )


# Pruning in the traced run: every prunable matrix after every step.


_SPARSITY_TOLERANCE = 0.005
# Share of a tensor that may reach zero without pruning.
_MAX_ZERO_SHARE = 0.01
# Scores closer than this share of the largest are ties in fp32.
_TIE_TOLERANCE = 1e-5
# Modules that zeros would pull towards a bias.
_GATES = (NeverPruned, MlpAttnGate, BranchGates)


def check_pruned(subject: StepUnderTest) -> list[CheckFinding]:
    """Check sparsity, scope, ramp and scores in the traced run and the driven run."""
    findings, subject.facts["pruned"] = _driven(subject, prunes=True)
    return _sparsity(subject) + _pruned_steps(subject) + findings


def _sparsity(subject: StepUnderTest) -> list[CheckFinding]:
    """Check how many weights are zero at the end, and that all are prunable."""
    traced, target = subject.traced_run, float(subject.config.values["PRUNING_SPARSITY"])
    prunable = prunable_rows(subject)
    matrices = [traced.final_weights[name][:rows] for name, rows in prunable.items()]
    size = sum(weight.numel() for weight in matrices)
    reached = sum(int((w == 0).sum()) for w in matrices) / size
    shares = [
        sum(int(step.zeros[name][:rows].sum()) for name, rows in prunable.items()) / size
        for step in traced.pruned_steps
    ]
    # Without a pruner, there are no pruned steps.
    recorded = traced.sparsity[: len(shares)]
    findings = compare("recorded-sparsity", "recorded sparsity of step", recorded, shares, 1e-9)
    near, found = abs(reached - target) <= _SPARSITY_TOLERANCE, f"{reached:.1%} of the weights"
    findings += expect(near, "target-sparsity", f"in the end a sparsity of {target:.0%}", found)
    for name, initial in traced.initial_weights.items():
        zeros = int((traced.final_weights[name] == 0).sum()) - int((initial == 0).sum())
        few = name in prunable or zeros <= _MAX_ZERO_SHARE * initial.numel()
        found = f"{zeros} weights became zero"
        findings += expect(few, "unpruned-parameter", f"no pruning of {name}", found)
    return findings


def prunable_rows(subject: StepUnderTest) -> dict[str, int]:
    """Return the number of prunable rows of each prunable matrix, in the model's order.

    Padding rows of the vocabulary are zero from the start.
    """
    traced, small = subject.traced_run, subject.small
    modules = traced.run.session.model.named_modules()
    gates = tuple(f"{path}." for path, module in modules if isinstance(module, _GATES))
    embeddings = ("wte.weight", "wpe.weight")
    return {
        name: small.model.shape.vocab_size if name == "wte.weight" else len(weight)
        for name, weight in traced.initial_weights.items()
        if weight.ndim >= 2
        and not name.startswith(gates)
        and (small.values["PRUNING_INCLUDE_EMBEDDINGS"] or name not in embeddings)
    }


def _pruned_steps(subject: StepUnderTest) -> list[CheckFinding]:
    """Check masks and states of every prunable matrix after every step.

    Pruned weights remain zero, without gradient and optimizer state.
    """
    alive: dict[str, Tensor] = {}
    for i, step in enumerate(subject.traced_run.pruned_steps, 1):
        prunable = prunable_rows(subject)
        odd = first_of(sorted(step.masks.keys() ^ prunable.keys()))
        what = f"prunable matrices without difference at step {i}"
        findings = expect(not odd, "prunable-parameter", what, odd)
        revived = [n for n in alive if bool((step.masks[n] & ~alive[n]).any())]
        what = f"weights that were pruned before step {i} stay pruned"
        findings += expect(not revived, "revived-weight", what, f"others of {first_of(revived)}")
        for kind, names in step.nonzero.items():
            what = f"{kind} 0 of the pruned weights at step {i}"
            found = f"others of {first_of(sorted(names))}"
            findings += expect(not names, "pruned-weight", what, found)
        if findings:
            return findings
        alive = step.masks
    return []
