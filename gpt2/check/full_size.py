"""A training step at the configured size runs and fits the memory of its target.

Fake tensors predict the step on any machine; the prediction is recorded with the findings.
"""

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.footprint.predict import HEADINGS, predict
from lib.errors import RunError
from lib.machine.gpus import GIB


def check(subject: Subject) -> list[Finding]:
    """Check dimensions, types and peak memory of a training step as configured."""
    config, target = subject.config, subject.workshop.target(subject.config.machine.device)
    try:
        needs = predict(config, target)
    except RunError as error:
        return [Finding("training-step", "a training step at the configured size", str(error))]
    name = target if isinstance(target, str) else target.name
    subject.facts["full_size"] = {
        "target": name,
        "parameters": needs.parameters,
        "flops_per_token": needs.flops_per_token,
        "peak_bytes": dict(needs.peak_bytes),
        "stage": needs.stage,
        "cpu_peak_bytes": needs.cpu_peak_bytes,
        "memory_gib": needs.memory_gib,
        "largest_micro_batch": needs.largest_micro_batch,
        "row": dict(zip(HEADINGS, needs.row(), strict=True)),
    }
    if needs.fits:
        return []
    peak, largest = needs.total_bytes / GIB, needs.largest_micro_batch
    text = f"peak memory of tensors {peak:.1f} of {needs.memory_gib:.1f} GiB"
    if largest:
        steps = config.train.global_batch // (largest * config.train.gpus)
        text += f"; SET='BATCH_SIZE={largest} GRAD_ACCUMULATION={steps}' fits"
    else:
        text += "; a single sequence does not fit either"
    return [Finding("fits-memory", f"BATCH_SIZE={config.train.batch_size} fits {name}", text)]
