"""How much of the devices' peak training uses: model FLOPs utilisation (MFU).

FLOPs of the model are counted as declared: forward and twice that backward, at full context, with
the pairs that a query sees; what is computed again to save memory is not counted (Chowdhery et al.
2022, arXiv 2204.02311, appendix B, which counts all pairs of attention).
"""

from gpt2.training.session import Session
from lib.machine.gpus import peak_tflops
from lib.machine.observe import device_name

_TERA = 1e12


def peak_flops(session: Session) -> float | None:
    """FLOP/s of all devices of the run at most; None, with a line in the log, where not known."""
    machine, given = session.config.machine, session.config.telemetry.peak_tflops
    name = device_name(session.device)
    if given is None and session.device.type == "cuda":
        given = peak_tflops(name, machine.precision, machine.matmul_precision)
    if given is None:
        what = f"no MFU: the {machine.precision} peak of {name} is not known"
        session.records.log("TRAIN", f"{what}; PEAK_TFLOPS can give it")
        return None
    return given * _TERA * session.group.size


def mfu(session: Session, tokens_per_second: float, peak_flops: float | None) -> float | None:
    """From 0 to 1, of all devices together; None where their peak is not known."""
    if peak_flops is None:
        return None
    return session.config.model.flops_per_token() * tokens_per_second / peak_flops
