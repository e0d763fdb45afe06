"""Options of the training environment; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class EnvironmentConfig:
    """Conditions checked before training starts. None of them affects results."""

    # any, conda, uv or venv.
    policy: str = symbol("ENV_POLICY", identity=False)
    # Last component of the environment's path; "" accepts any.
    name: str = symbol("ENV_NAME", identity=False)
    # Python version or a prefix of it; "" accepts any.
    python: str = symbol("ENV_PYTHON", identity=False)
    forbid_foreign: bool = symbol("ENV_FORBID_FOREIGN", identity=False)
    # Relative to the tree; "" if there is no lock file.
    lock_file: str = symbol("ENV_LOCK_FILE", identity=False)
    lock_enforce: bool = symbol("ENV_LOCK_ENFORCE", identity=False)
    snapshot: bool = symbol("ENV_SNAPSHOT", identity=False)
    snapshot_max_age_hours: int = symbol("ENV_SNAPSHOT_MAX_AGE_HOURS", identity=False)
    gpu_pinned: bool = symbol("GPU_PINNED", identity=False)
    min_disk_gib: int = symbol("MIN_DISK_GIB", identity=False)
