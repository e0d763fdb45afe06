"""Pruning and the optimizer act, by the formulas of those that are configured."""

from torch import Tensor, nn

from gpt2.check.finding import Finding
from gpt2.check.replay import replay
from gpt2.check.subject import Subject
from gpt2.check.trial import FOLLOWED, first_numbers
from lib.pruning import PRUNERS
from lib.pruning.mask import Unprunable

_SPARSITY_TOLERANCE = 0.005
# Part of a tensor that may come to a zero by itself.
_ROUNDED = 0.01
# Scores in fp32 change places, by this part of the largest.
_TIE = 1e-5


def check(subject: Subject) -> list[Finding]:
    """Sparsity along the trial's ramp, what was pruned for it, and every update."""
    pruned = subject.config.pruning.name != "none"
    found = _sparsity(subject) + _choice(subject) if pruned else []
    return found + replay(subject)


def _sparsity(subject: Subject) -> list[Finding]:
    trial, target = subject.trial, subject.config.pruning.target
    kept = _kept(trial.rehearsal.session.model)
    # Rows that pad the vocabulary are zero from the start.
    used = {"wte.weight": subject.shrunk.model.shape.vocab_size}
    matrices = {
        name: w[: used.get(name)]
        for name, w in trial.end.items()
        if name not in kept and _prunable(subject, name, w)
    }
    size = sum(w.numel() for w in matrices.values())
    reached = sum(int((w == 0).sum()) for w in matrices.values()) / size
    found = []
    if not target - _SPARSITY_TOLERANCE <= reached <= target + _SPARSITY_TOLERANCE:
        text = f"{reached:.1%} of the weights are zero at the end of the budget"
        found.append(Finding(f"a sparsity of {target:.0%}", text))
    for name in trial.end.keys() - matrices.keys():
        more = int((trial.end[name] == 0).sum()) - int((trial.start[name] == 0).sum())
        if more > _ROUNDED * trial.end[name].numel():
            found.append(Finding(f"{name} is not pruned", f"{more} of its weights became zero"))
    fallen = any(b < a for a, b in zip(trial.sparsity, trial.sparsity[1:]))
    if fallen or trial.sparsity[0] >= target:
        steps = ", ".join(f"{s:.1%}" for s in trial.sparsity)
        found.append(Finding("a sparsity that grows along the ramp", steps))
    return found


def _kept(model: nn.Module) -> set[str]:
    """Parameters of modules that ask not to be pruned."""
    asking = [path for path, module in model.named_modules() if isinstance(module, Unprunable)]
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(asking))}


def _prunable(subject: Subject, name: str, weight: Tensor) -> bool:
    embedding = name in ("wte.weight", "wpe.weight")
    return weight.ndim >= 2 and (subject.config.pruning.include_embeddings or not embedding)


def _choice(subject: Subject) -> list[Finding]:
    """Of a matrix, every time, the weights go that score lowest by the pruner's formulas."""
    trial, options = subject.trial, subject.shrunk.pruning
    reference = PRUNERS.reference(options.name)(options)
    alive = [True] * len(first_numbers(trial.start[FOLLOWED[1]]))
    for step, (seen, left) in enumerate(zip(trial.seen, trial.left, strict=True), 1):
        scores = reference.scores(seen)
        gone = [s for s, was, is_ in zip(scores, alive, left, strict=True) if was and not is_]
        stay = [s for s, is_ in zip(scores, left, strict=True) if is_]
        if gone and stay and max(gone) > min(stay) + _TIE * max(map(abs, scores)):
            text = f"one of {max(gone):.3g} goes at step {step}, one of {min(stay):.3g} stays"
            return [Finding(f"the lowest scores of {options.name} are pruned", text)]
        alive = left
    return []
