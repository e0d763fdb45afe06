"""A training step at the configured size works, and fits the memory of its target.

By fake tensors, on any machine; what it takes is noted beside what is wrong with it.
"""

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.footprint.predict import HEADINGS, predict
from lib.errors import RunError
from lib.machine.gpus import GIB


def check(subject: Subject) -> list[Finding]:
    """Dimensions, types and memory of model, batch, sequence and optimizer as configured."""
    config, target = subject.config, subject.workshop.target(subject.config.machine.device)
    try:
        needs = predict(config, target)
    except RunError as error:
        return [Finding("a training step at the configured size", str(error))]
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
    text = f"its tensors take {peak:.1f} of {needs.memory_gib:.1f} GiB at their peak"
    if largest:
        steps = config.train.global_batch // (largest * config.train.gpus)
        text += f"; SET='BATCH_SIZE={largest} GRAD_ACCUMULATION={steps}' fits"
    else:
        text += "; not even one sequence fits"
    return [Finding(f"BATCH_SIZE={config.train.batch_size} fits {name}", text)]
