"""What a run may be trained in; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class EnvironmentConfig:
    """Conditions of a start. None of them can change a bit of a result."""

    # any, conda, uv or venv
    policy: str = symbol("ENV_POLICY", identity=False)
    # Last part of the environment's path; "" takes any.
    name: str = symbol("ENV_NAME", identity=False)
    # Leading parts of Python's version; "" takes any.
    python: str = symbol("ENV_PYTHON", identity=False)
    forbid_foreign: bool = symbol("ENV_FORBID_FOREIGN", identity=False)
    # Relative to the tree; "" where there is none.
    lock_file: str = symbol("ENV_LOCK_FILE", identity=False)
    lock_enforce: bool = symbol("ENV_LOCK_ENFORCE", identity=False)
    snapshot: bool = symbol("ENV_SNAPSHOT", identity=False)
    snapshot_max_age_hours: int = symbol("ENV_SNAPSHOT_MAX_AGE_HOURS", identity=False)
    gpu_pinned: bool = symbol("GPU_PINNED", identity=False)
    min_disk_gib: int = symbol("MIN_DISK_GIB", identity=False)
