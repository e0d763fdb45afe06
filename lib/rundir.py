"""A run's directory: the one owner of every file name in it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """Names of the files below ``path``; creates nothing."""

    path: Path

    @property
    def status(self) -> Path:
        """What became of the run; SUCCESS is written last."""
        return self.path / "status.json"

    @property
    def manifest(self) -> Path:
        """Code, environment, machine, data and knobs, with digests of the other files."""
        return self.path / "manifest.json"

    @property
    def environment(self) -> Path:
        """Snapshot of what the run was trained in."""
        return self.path / "environment"

    @property
    def code_diff(self) -> Path:
        """What no commit names of the code that trained the run, as git applies it."""
        return self.path / "code.diff"

    @property
    def resolved_config(self) -> Path:
        """The symbols that made the run, and its identity."""
        return self.path / "resolved_config.yaml"

    @property
    def summary(self) -> Path:
        """Final results; what is volatile stands apart under ``timing``."""
        return self.path / "summary.json"

    @property
    def per_query(self) -> Path:
        """One row for each evaluation document."""
        return self.path / "per_query.csv"

    @property
    def metrics(self) -> Path:
        """Deterministic records, one JSON line each."""
        return self.path / "metrics.jsonl"

    @property
    def timing(self) -> Path:
        """Volatile records (seconds, tokens per second), one JSON line each."""
        return self.path / "timing.jsonl"

    @property
    def telemetry(self) -> Path:
        """Samples of GPUs, memory and processor time, one JSON line each."""
        return self.path / "telemetry.jsonl"

    def heartbeat(self, rank: int) -> Path:
        """Signs of life of one process, one JSON line each."""
        return self.path / f"heartbeat_rank{rank}.jsonl"

    def heartbeats(self) -> dict[int, Path]:
        """Those that are there, by rank."""
        found = self.path.glob("heartbeat_rank*.jsonl")
        return {int(path.stem.removeprefix("heartbeat_rank")): path for path in sorted(found)}

    @property
    def logs(self) -> Path:
        """What the run printed."""
        return self.path / "logs.txt"

    @property
    def sample(self) -> Path:
        """Text the trained model wrote."""
        return self.path / "sample.txt"

    @property
    def numerics_failure(self) -> Path:
        """What is known of the step whose numbers were not finite; only where there was one."""
        return self.path / "numerics_failure.json"

    @property
    def numerics_batch(self) -> Path:
        """Token ids and random states of that step, as all ranks began it."""
        return self.path / "numerics_failure.safetensors"

    @property
    def overcome(self) -> Path:
        """Both of them, in a run that a later start has got past that step."""
        return self.path / "overcome"

    @property
    def trackers(self) -> Path:
        """What was told to trackers, and their own files."""
        return self.path / "trackers"

    @property
    def tracker_facts(self) -> Path:
        """What every tracker is told before the first metric."""
        return self.trackers / "facts.json"

    def tracker_log(self, name: str) -> Path:
        """What a tracker's process printed."""
        return self.trackers / f"{name}.log"

    @property
    def checkpoints(self) -> Path:
        """One folder for each kept checkpoint."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Final weights."""
        return self.path / "model.safetensors"

    def evaluation(self, scheme: str) -> Path:
        """What an evaluation after the training, with weights rounded by ``scheme``, leaves."""
        return self.path / "evaluations" / scheme

    @property
    def stop_request(self) -> Path:
        """While it is there, the run saves and stops; the next start removes it."""
        return self.path / "stop"

    @property
    def lock(self) -> Path:
        """Held by the process that trains the run."""
        return self.path / ".lock"
