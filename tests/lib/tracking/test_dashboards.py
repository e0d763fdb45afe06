"""Local dashboards are reachable from this machine only."""

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
from lib.tracking.dashboards import serve_dashboard
serve_dashboard(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_tensorboard_answers_on_loopback_and_nowhere_else(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "run-s1-0/trackers/tensorboard").mkdir(parents=True)
    port = free_port()
    command = [sys.executable, "-c", SERVE, "tensorboard", str(tmp_path), str(port)]
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


@pytest.mark.parametrize("name", dashboards.DASHBOARD_PORTS)
def test_without_runs_the_error_gives_the_setting(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    with pytest.raises(PreflightError) as caught:
        dashboards.serve_dashboard(name, tmp_path, 1)
    assert caught.value.codes == ["run.not-found"]
    assert f"SET=TRACKER_{name.upper()}=y" in str(caught.value)


def test_trackio_is_served_from_the_folder_that_it_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    with pytest.raises(PreflightError) as caught:
        dashboards.serve_dashboard("trackio", tmp_path, 1)
    assert caught.value.codes == ["run.not-found"]
    assert caught.value.problems[0].where == f"{tmp_path}/store"
    (tmp_path / "store").mkdir()
    (tmp_path / "store/kablate-single.db").touch()
    started = []
    monkeypatch.setattr(dashboards.os, "execve", lambda *args: started.append(args))
    dashboards.serve_dashboard("trackio", tmp_path, 1)
    assert started[0][2]["TRACKIO_DIR"] == str(tmp_path / "store")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards, "find_spec", lambda name: None)
    with pytest.raises(PreflightError) as caught:
        dashboards.serve_dashboard("trackio", tmp_path, 1)
    assert caught.value.codes == ["env.missing-package"]
    assert "make setup EXTRAS=trackio" in str(caught.value)
