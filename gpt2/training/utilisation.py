"""Model FLOPs utilisation (MFU): the share of the devices' peak FLOP/s that training uses.

Model FLOPs are counted as forward plus twice that for backward, at full context, with the attended
pairs only. Recomputation to save memory is not counted (Chowdhery et al. 2022, arXiv 2204.02311,
appendix B; the paper counts all pairs of attention).
"""

from gpt2.training.session import Session
from lib.machine.gpus import peak_tflops
from lib.machine.observe import device_name

_TERA = 1e12


def peak_flops(session: Session) -> float | None:
    """Return the peak FLOP/s of all devices of the run; log a line and return None if unknown."""
    machine, tflops = session.config.machine, session.config.telemetry.peak_tflops
    name = device_name(session.device)
    if tflops is None and session.device.type == "cuda":
        tflops = peak_tflops(name, machine.precision, machine.matmul_precision)
    if tflops is None:
        what = f"no MFU: unknown {machine.precision} peak of {name}"
        session.records.log("TRAIN", f"{what}; set PEAK_TFLOPS")
        return None
    return tflops * _TERA * session.group.size


def mfu(session: Session, tokens_per_second: float, peak_flops: float | None) -> float | None:
    """Return the MFU of all devices together, from 0 to 1; None if their peak is unknown."""
    if peak_flops is None:
        return None
    return session.config.model.flops_per_token() * tokens_per_second / peak_flops
