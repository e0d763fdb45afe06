"""TensorBoard is reachable from this machine only."""

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from lib.errors import PreflightError
from lib.tracking import dashboards

SERVE = """
import sys
from pathlib import Path
from lib.tracking.dashboards import serve_tensorboard
serve_tensorboard(Path(sys.argv[1]), int(sys.argv[2]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_tensorboard_answers_on_loopback_and_nowhere_else(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "run-s1-0/trackers/tensorboard").mkdir(parents=True)
    port = free_port()
    command = [sys.executable, "-c", SERVE, str(tmp_path), str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            assert "TensorBoard" in wait_for_page(f"http://127.0.0.1:{port}/")
            listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
            hosts = {
                line.split()[1].split(":")[0]
                for line in listening.splitlines()
                if f":{port:04X} " in line and " 0A " in line
            }
            # 127.0.0.1, as the kernel writes it.
            assert hosts == {"0100007F"}
        finally:
            process.kill()


def wait_for_page(url: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url) as page:
                return page.read().decode()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_without_runs_the_error_gives_the_setting(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(PreflightError) as caught:
        dashboards.serve_tensorboard(tmp_path, 1)
    assert caught.value.codes == ["run.not-found"]
    assert "SET=TRACKER_TENSORBOARD=y" in str(caught.value)


def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboards, "find_spec", lambda name: None)
    with pytest.raises(PreflightError) as caught:
        dashboards.serve_tensorboard(tmp_path, 1)
    assert caught.value.codes == ["env.missing-package"]
    assert "make setup EXTRAS=tensorboard" in str(caught.value)
