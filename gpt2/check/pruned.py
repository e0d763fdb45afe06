"""Pruner and optimizer follow the formulas of the configured algorithms."""

from torch import Tensor, nn

from gpt2.check.finding import Finding
from gpt2.check.replay import replay
from gpt2.check.subject import Subject
from gpt2.check.trial import FOLLOWED, first_numbers
from lib.pruning import PRUNERS
from lib.pruning.mask import Unprunable

_SPARSITY_TOLERANCE = 0.005
# Share of a tensor that may reach zero without pruning.
_MAX_ZERO_SHARE = 0.01
# Scores closer than this share of the largest are ties in fp32.
_TIE_TOLERANCE = 1e-5


def check(subject: Subject) -> list[Finding]:
    """Check sparsity along the trial's ramp, the pruned weights, and every optimizer update."""
    pruned = subject.config.pruning.name != "none"
    findings = _sparsity(subject) + _pruning_order(subject) if pruned else []
    return findings + replay(subject)


def _sparsity(subject: Subject) -> list[Finding]:
    trial, target = subject.trial, subject.config.pruning.target
    unprunable = _unprunable(trial.rehearsal.session.model)
    # Padding rows of the vocabulary are zero from the start.
    used_rows = {"wte.weight": subject.shrunk.model.shape.vocab_size}
    matrices = {
        name: w[: used_rows.get(name)]
        for name, w in trial.end.items()
        if name not in unprunable and _prunable(subject, name, w)
    }
    size = sum(w.numel() for w in matrices.values())
    reached = sum(int((w == 0).sum()) for w in matrices.values()) / size
    findings = []
    if not target - _SPARSITY_TOLERANCE <= reached <= target + _SPARSITY_TOLERANCE:
        text = f"{reached:.1%} of the weights are zero at the end of the budget"
        findings.append(Finding("target-sparsity", f"a sparsity of {target:.0%}", text))
    for name in trial.end.keys() - matrices.keys():
        new_zeros = int((trial.end[name] == 0).sum()) - int((trial.start[name] == 0).sum())
        if new_zeros > _MAX_ZERO_SHARE * trial.end[name].numel():
            text = f"{new_zeros} weights became zero"
            findings.append(Finding("unpruned-parameter", f"no pruning of {name}", text))
    decreases = any(b < a for a, b in zip(trial.sparsity, trial.sparsity[1:]))
    if decreases or trial.sparsity[0] >= target:
        steps = ", ".join(f"{s:.1%}" for s in trial.sparsity)
        findings.append(Finding("sparsity-ramp", "a sparsity that grows along the ramp", steps))
    return findings


def _unprunable(model: nn.Module) -> set[str]:
    """Return the parameters of modules that must not be pruned."""
    paths = [path for path, module in model.named_modules() if isinstance(module, Unprunable)]
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(paths))}


def _prunable(subject: Subject, name: str, weight: Tensor) -> bool:
    embedding = name in ("wte.weight", "wpe.weight")
    return weight.ndim >= 2 and (subject.config.pruning.include_embeddings or not embedding)


def _pruning_order(subject: Subject) -> list[Finding]:
    """Check that the weights of a matrix with the lowest scores are pruned at every event."""
    trial, options = subject.trial, subject.shrunk.pruning
    reference = PRUNERS.reference(options.name)(options)
    alive = [True] * len(first_numbers(trial.start[FOLLOWED[1]]))
    for step, (inputs, mask) in enumerate(zip(trial.seen, trial.left, strict=True), 1):
        scores = reference.scores(inputs)
        pruned = [s for s, was, is_ in zip(scores, alive, mask, strict=True) if was and not is_]
        remaining = [s for s, is_ in zip(scores, mask, strict=True) if is_]
        if (
            pruned
            and remaining
            and max(pruned) > min(remaining) + _TIE_TOLERANCE * max(map(abs, scores))
        ):
            text = f"step {step} prunes {max(pruned):.3g} and leaves {min(remaining):.3g}"
            expected = f"the lowest scores of {options.name} are pruned"
            return [Finding("pruning-order", expected, text)]
        alive = mask
    return []
