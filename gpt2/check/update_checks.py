"""Optimizer, pruner, schedule and budget follow the documented formulas.

A driven run (``gpt2/check/driven.py``) is compared with ``lib/optim/reference.py`` and
``lib/pruning/reference.py``; the traced run shows to which parameters of the step the rules apply.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from gpt2.check import driven
from gpt2.check.driven import DrivenRun, Weights, driven_config
from gpt2.check.finding import CheckFinding, compare, expect
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.mlp.gate import MlpAttnGate
from gpt2.nsa.module import BranchGates
from gpt2.training.budget import TrainingBudget
from gpt2.training.state import TrainState
from lib.optim.reference import AdamwspamReference, OptimizedTensor, optimizer_reference
from lib.pruning.layers import NeverPruned
from lib.pruning.options import PruningOptions, StateOptions
from lib.pruning.pruners import MaskPruner
from lib.pruning.reference import (
    REFERENCES,
    PruningSnapshot,
    documented_stretch,
    lowest,
    ramp_sparsity,
    scope_sparsities,
)
from lib.units import first_of

# Relative; losses are added in fp32.
_TOLERANCE, _LOSS_TOLERANCE = 1e-9, 1e-5
# torch divides GRAD_CLIP by the norm plus this number.
_CLIP_EPS = 1e-6
_ROUNDING = 1e-13
# Shapes of the matrices that decay; the first tensor stacks two.
_MATRICES = {
    "first.weight": ((2, 4), (3, 4)),
    "second.weight": ((4, 3),),
    "gate.weight": ((1, 4),),
}
_PRUNABLE = ("first.weight", "second.weight")
_EMBEDDING = "wte.weight"
_SPARSITY_TOLERANCE = 0.005
# Share of a tensor that may reach zero without pruning.
_MAX_ZERO_SHARE = 0.01
# Scores closer than this share of the largest are ties in fp32.
_TIE_TOLERANCE = 1e-5
# Modules that zeros would pull towards a bias.
_GATES = (NeverPruned, MlpAttnGate, BranchGates)


def check_optimized(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check that matrices alone decay, also those of gates, and the updates of the driven run."""
    decay, state = subject.small.optimizer.weight_decay, subject.traced_run.session
    model = state.model
    tables = {id(t.weight) for t in (model.wte, model.wpe, model.lm_head) if t is not None}
    for group in state.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            expected = decay * (parameter.ndim >= 2 and id(parameter) not in tables)
            what = f"for {name} a weight decay of"
            yield from compare("weight-decay", what, group["weight_decay"], expected)
            if state.config.optimizer.rule.whole_matrices:
                rows, what = group.get("rows", ()), f"updated as matrices, of {name} the rows"
                yield from compare("matrix-rows", what, rows, _rows(state, name, parameter))
    yield from (f for f in _driven(subject)[0] if f.property == "driven-update")


def _rows(state: TrainState, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the rows of the matrices that a parameter of a model stacks, () outside of blocks."""
    shape, attention, rows = state.config.model.shape, state.config.model.attention, len(parameter)
    shared = attention.projection.expanded_numbers(shape) // 2
    if not name.startswith("h.") or parameter.ndim < 2:
        return ()
    if name.endswith("attn.c_attn.weight"):
        return (shape.n_embd, shared, shared)
    if name.endswith("c_kv.weight"):
        return (shared,) * (rows // shared)
    if name.endswith("mlp.c_fc.weight"):
        gates = state.config.model.mlp.activation.fc_outputs
        return (rows // gates,) * gates
    return (rows,)


def check_pruned(subject: StepUnderTest) -> list[CheckFinding]:
    """Check sparsity and scope in the traced run, and every step of the driven run."""
    weights, records = _driven(subject)
    norms = [finding for finding in records if finding.property == "step-record"]
    return [*_sparsity(subject), *weights, *norms]


def check_budgeted(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check the tokens of a configured step, and the records of the driven run."""
    symbols: dict[str, Any] = dict(subject.config.values)
    factors = ("BATCH_SIZE", "GRAD_ACCUMULATION", "GPUS", "BLOCK_SIZE")
    tokens, what = math.prod(symbols[name] for name in factors), "tokens per step, by the symbols"
    budget = TrainingBudget(subject.config)
    yield from compare("tokens-per-iteration", what, budget.tokens_per_iteration, tokens)
    yield from _driven(subject)[1]


def _driven(subject: StepUnderTest) -> tuple[list[CheckFinding], list[CheckFinding]]:
    """Return findings of the weights and of the records, which steps with equal settings share."""
    config = driven_config(subject.small_exact, subject.config)

    def compared() -> tuple[list[CheckFinding], list[CheckFinding]]:
        run = DrivenRun(subject.traced_run.session, config)
        progress = _expected_progress(config)
        steps = _Simulation(run, progress).steps
        return _weights(run, steps), _records(run, steps, progress)

    length = config.model.shape.block_size
    key = (config.train, config.schedule, config.optimizer, config.pruning, length)
    return subject.context.once(key, compared)


@dataclass
class _Step:
    """A simulated step: the weights before and after it, and the gradient norm before clipping."""

    before: Weights
    after: Weights
    norm: float
    # What the rule does in this step.
    events: str
    # Scores at the end of a pruning, by matrix.
    scores: Weights
    # Share of the prunable weights that are pruned.
    sparsity: float


class _Simulation:
    """The steps of a driven run by the formulas; every tensor as a flat list, by position."""

    def __init__(self, run: DrivenRun, progress: Sequence[float]) -> None:
        self.config, self.names = run.config, list(run.start)
        self.rule: Any = self.config.optimizer.rule
        self.used = run.model.wte.used_rows * run.model.wte.embedding_dim
        decay, peak = self.rule.weight_decay, self.config.schedule.learning_rate
        tensors = [
            OptimizedTensor(run.start[n], decay * (n in _MATRICES), _MATRICES.get(n, ()))
            for n in self.names
        ]
        self.reference: Any = optimizer_reference(self.rule, tensors, peak)
        self.alive = [np.full(len(run.start[name]), True) for name in self.names]
        # Unclipped gradients and weights of each step.
        self.history: list[tuple[list[Any], list[Any]]] = []
        self.reached = self.sparsity = 0.0
        rates = _rates(self.config, progress)
        self.steps = [
            self._step([tensors[n].flatten().numpy() for n in self.names], i, *given)
            for i, (tensors, *given) in enumerate(
                zip(run.gradients, rates, progress, strict=False), 1
            )
        ]

    def _step(self, gradients: list[Any], step: int, lr: float, progress: float) -> _Step:
        """Mask, measure, clip, update and prune, as documented."""
        masked = [np.where(*pair, 0.0) for pair in zip(self.alive, gradients, strict=True)]
        norm = math.sqrt(sum(float(g @ g) for g in masked))
        before = self._weights()
        self.history.append((masked, list(before.values())))
        clip, share = self.config.train.grad_clip, 1.0
        if clip and norm > clip:
            share = clip / (norm + _CLIP_EPS)
        self.reference.step([g * share for g in masked], lr, norm)
        for weights, alive in zip(self.reference.parameters, self.alive, strict=True):
            # An update of whole matrices moves pruned weights too.
            weights[~alive] = 0.0
        options, scores = self.config.pruning, Weights()
        if isinstance(options, PruningOptions):
            if progress >= options.ramp_end:
                due = self.reached < options.target
            else:
                due = progress > options.warmup and step % options.frequency == 0
            if due:
                self.reached = ramp_sparsity(options, progress)
                scores = self._prune(options)
        return _Step(before, self._weights(), norm, self._events(step), scores, self.sparsity)

    def _weights(self) -> Weights:
        pairs = zip(self.names, self.reference.parameters, strict=True)
        return {name: values.tolist() for name, values in pairs}

    def _prune(self, options: PruningOptions) -> Weights:
        """Prune, and return the scores afterwards."""
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
        self.sparsity = sum(int((~alive).sum()) for alive in self.alive) / sum(sizes)
        return {name: self._scores(options, name) for name in prunable}

    def _scores(self, options: PruningOptions, name: str) -> list[float]:
        """Return the scores of the used rows of a matrix, minus infinity for pruned weights."""
        k, reference = self.names.index(name), self.reference
        history = [(gradients[k], weights[k]) for gradients, weights in self.history]
        moments: dict[str, Any] = {}
        if "beta1" in vars(self.rule):
            correction = 1.0 - self.rule.beta1**reference.t
            moments = {"m": reference.m[k], "v": reference.v[k], "bias_correction": correction}
        seen = PruningSnapshot(reference.parameters[k], history, **moments)
        scores = REFERENCES[type(options)](options, seen)
        used = self.used if name == _EMBEDDING else None
        return np.where(self.alive[k], scores, -math.inf)[:used].tolist()

    def _events(self, step: int) -> str:
        events = []
        if isinstance(self.reference, AdamwspamReference):
            if step > self.reference.options.interval:
                events.append(f"step {self.reference.t} after a reset")
            events += ["spike"] if step in self.reference.spikes else []
            clipped = sum(n == step for n, _, _ in self.reference.clipped)
            events += [f"{clipped} elements clipped"] if clipped else []
        if step in driven.CLIPPED_STEPS:
            events.append("norm above GRAD_CLIP")
        if step == driven.RESUMED_AFTER + 1:
            events.append("resumed")
        return f" ({', '.join(events)})" if events else ""


def _weights(run: DrivenRun, steps: Sequence[_Step]) -> list[CheckFinding]:
    """Return the findings of the first step after which a weight or score is another."""
    rule, pruner = run.config.optimizer.rule.name, run.config.pruning.name
    for i, (step, actual) in enumerate(zip(steps, run.weights, strict=False), 1):
        # Nothing has scores if the configured pruner was not built; then the updates differ.
        if run.scores:
            findings = _zeros(pruner, actual, step.after, f"at step {i} of {len(steps)}")
            what = f"optimizer state 0 of the pruned weights at step {i}"
            found = f"others of {first_of(sorted(run.stateful[i - 1]))}"
            findings += expect(not run.stateful[i - 1], "pruned-weight", what, found)
            findings += _wrong_scores(run.config, run.scores[i - 1], step.scores)
            if findings:
                return findings
        for name, values in step.after.items():
            change = max(abs(e - s) for e, s in zip(values, run.start[name], strict=True))
            bound = _TOLERANCE * change + _ROUNDING * max(map(abs, values))
            error = max(abs(e - a) for e, a in zip(values, actual[name], strict=True))
            if not error <= bound:
                kind = "a matrix" if name in _MATRICES else "an embedding" if "wte" in name else ""
                text = f"the update of {rule} at step {i}{step.events} of {kind or 'a vector'}"
                text += " with given gradients"
                return [CheckFinding("driven-update", text, f"weights that differ by {error:.1e}")]
    return []


def _wrong_scores(config: Config, actual: Weights, expected: Weights) -> list[CheckFinding]:
    """Compare the scores of remaining weights after a pruning, in fp32."""
    what = f"a score by the formula of {config.pruning.summary}:"
    for name, values in expected.items():
        largest = max((abs(s) for s in values if s > -math.inf), default=0.0)
        for score, value in zip(values, actual[name], strict=False):
            if score > -math.inf and abs(score - value) > _TIE_TOLERANCE * largest:
                return compare("pruning-score", what, value, score)
    return []


def _zeros(pruner: str, actual: Weights, expected: Weights, at: str) -> list[CheckFinding]:
    """Compare which weights are zero."""
    zeros, expected_zeros = (
        {(n, i) for n, flat in weights.items() for i, w in enumerate(flat) if w == 0.0}
        for weights in (actual, expected)
    )
    others = {n for n, _ in zeros - expected_zeros} - {*_PRUNABLE, _EMBEDDING}
    ramp = f"{len(expected_zeros)} zeros {at}, by ramp, frequency and scope of {pruner}"
    order = f"the lowest scores of {pruner} are pruned {at}"
    return (
        expect(not others, "unpruned-parameter", "pruning of matrices alone", f"of {others}")
        or expect(len(zeros) == len(expected_zeros), "sparsity-ramp", ramp, f"{len(zeros)} zeros")
        or expect(zeros == expected_zeros, "pruning-order", order, "other weights are zero")
    )


def _records(run: DrivenRun, steps: Sequence[_Step], progress: list[float]) -> list[CheckFinding]:
    """Compare the records of the trainer's loop, with evaluations and a resume."""
    count, rows, evaluations = len(progress), run.rows["train"], run.rows["eval"]
    tokens = run.config.train.global_batch * run.config.model.shape.block_size
    places = [(i, i * tokens) for i in range(driven.EVAL_INTERVAL, count, driven.EVAL_INTERVAL)]
    found = [(row["iteration"], row["tokens"]) for row in evaluations]
    scores = [(row["val_loss"], row["token_accuracy"], row["sparsity"]) for row in evaluations]
    score = (driven.EVALUATED_LOSS, 1 / driven.EVALUATED)
    evaluated = steps[driven.EVAL_INTERVAL - 1 : count - 1 : driven.EVAL_INTERVAL]
    expected_scores = [(*score, step.sparsity) for step in evaluated]
    loss = math.fsum(
        w * g
        for name, weights in run.start.items()
        for w, g in zip(weights, run.gradients[0][name].flatten().tolist(), strict=True)
    )
    norms, measured = [step.norm for step in steps], [row["grad_norm"] for row in rows]
    rates = _rates(run.config, progress)
    used = run.consumed, *run.tokens
    columns: tuple[tuple[str, str, Any, Any, float], ...] = (
        ("budget-steps", "a last step", rows[-1]["iteration"], count, 0.0),
        ("budget-steps", "step", [row["iteration"] for row in rows], [*range(1, count + 1)], 0.0),
        ("budget-tokens", "tokens", used, (count * tokens,) * 3, 0.0),
        ("budget-progress", "progress", [row["progress"] for row in rows], progress, _TOLERANCE),
        ("budget-learning-rate", "rate", [row["lr"] for row in rows], rates, _TOLERANCE),
        ("evaluation-position", "(iteration, tokens) of evaluations", found, places, 0.0),
        ("evaluation-record", "loss, accuracy and sparsity", scores, expected_scores, 0.0),
        ("step-record", "loss of step 1", rows[0]["loss"], loss, _LOSS_TOLERANCE),
        ("step-record", "norm of step", measured, norms, _LOSS_TOLERANCE),
    )
    what = f"with a budget of {run.config.train.budget}, evaluations and a resume, "
    for name, column, actual, expected, tolerance in columns:
        if findings := compare(name, what + column, actual, expected, tolerance):
            return findings
    return []


# The share of the budget that is used, and the learning rate that follows it.


def _stretch(config: Config) -> float:
    """Return the documented budget of the pruner as a multiple of the configured one."""
    options = config.pruning
    if isinstance(options, StateOptions) and config.values["ADAMWPRUNE_STRETCH"]:
        return documented_stretch(str(config.values["ADAMWPRUNE_VARIANT"]))
    return 1.0


def _expected_progress(config: Config) -> list[float]:
    """Return the share of a driven run's budget that is used after each step."""
    length = driven.STEPS * _stretch(config)
    if config.train.budget != "time":
        return [(i + 1) / round(length) for i in range(round(length))]
    per_step = driven.PASS_SECONDS * config.train.grad_accumulation
    return [min(1.0, (i + 1) * per_step / length) for i in range(math.ceil(length / per_step))]


def _rates(config: Config, progress: Sequence[float]) -> list[float]:
    """Return the learning rates, which follow the used budget after the warm-up."""
    options, used = config.schedule, [0.0, *progress]
    peak, low, warmup = options.learning_rate, options.min_learning_rate, options.warmup_steps
    rates = [peak * (step + 1) / warmup for step in range(warmup)]
    for before in used[warmup:-1]:
        x = (before - used[warmup]) / (1.0 - used[warmup])
        rates.append(
            {
                "constant": peak,
                "linear": low * x + peak * (1 - x),
                "cosine": low + (peak - low) * math.cos(math.pi * x / 2) ** 2,
                "wsd": low + (peak - low) * min(1.0, (1 - x) / options.wsd_decay_fraction),
            }[options.kind]
        )
    return rates


# Pruning in the traced run: which matrices are pruned, and how far.


def _sparsity(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check how many weights are zero at the end, and that all are prunable."""
    traced, target = subject.traced_run, float(subject.config.values["PRUNING_SPARSITY"])
    prunable, pruner = prunable_rows(subject), traced.session.pruner
    masks = pruner.masks.keys() if isinstance(pruner, MaskPruner) else set[str]()
    odd = first_of(sorted(masks ^ prunable.keys()))
    what = "masks of prunable matrices without difference"
    yield from expect(not odd, "prunable-parameter", what, odd)
    revived = first_of(sorted(traced.revived))
    yield from expect(not revived, "revived-weight", "pruned weights stay pruned", f"not {revived}")
    matrices = [traced.final_weights[name][:rows] for name, rows in prunable.items()]
    zeros = sum(int((matrix == 0).sum()) for matrix in matrices)
    reached = zeros / sum(matrix.numel() for matrix in matrices)
    yield from compare("recorded-sparsity", "recorded sparsity", pruner.sparsity(), reached, 1e-9)
    near, found = abs(reached - target) <= _SPARSITY_TOLERANCE, f"{reached:.1%} of the weights"
    yield from expect(near, "target-sparsity", f"in the end a sparsity of {target:.0%}", found)
    for name, initial in traced.initial_weights.items():
        zeros = int((traced.final_weights[name] == 0).sum()) - int((initial == 0).sum())
        few = name in prunable or zeros <= _MAX_ZERO_SHARE * initial.numel()
        found = f"{zeros} weights became zero"
        yield from expect(few, "unpruned-parameter", f"no pruning of {name}", found)


def prunable_rows(subject: StepUnderTest) -> dict[str, int]:
    """Return the rows of each prunable matrix, without padding, in the model's order."""
    traced, small = subject.traced_run, subject.small
    modules = traced.session.model.named_modules()
    gates = tuple(f"{path}." for path, module in modules if isinstance(module, _GATES))
    padded = ("wte.weight", "lm_head.weight")
    return {
        name: small.model.shape.vocab_size if name in padded else len(weight)
        for name, weight in traced.initial_weights.items()
        if weight.ndim >= 2
        and not name.startswith(gates)
        and (small.values["PRUNING_INCLUDE_EMBEDDINGS"] or name not in (*padded, "wpe.weight"))
    }
