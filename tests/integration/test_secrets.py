"""Secrets of the environment do not appear in files or output of a study."""

import base64
import hashlib
import json

from tests.integration.conftest import SINGLE
from tests.loopback.wandb_server import serving

# Recognizable values; W&B requires keys of at least forty characters.
SECRETS = {
    name: f"{name.lower().replace('_', '')}5ec7e7{'0123456789' * 3}"
    for name in (
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "MY_SERVICE_TOKEN",
        "SIGNING_KEY",
        "CLIENT_SECRET",
    )
}

# Password in the URL of a server.
PASSWORD = f"password5ec7e7{'0123456789' * 3}"


def forms(secret: str) -> list[bytes]:
    """Return the secret in plain form and as in HTTP basic authorization."""
    return [secret.encode(), base64.b64encode(f"api:{secret}".encode())]


def leaks(folder, secrets, **texts):
    """Return where a secret is, in files other than the configuration, which is the user's."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if not path.name.startswith((".config", "config.py"))]
    names = {path.name for path in files}
    assert {"manifest.json", "facts.json", "packages.txt", "logs.txt", "report.html"} <= names
    assert any(name.startswith("events.out") for name in names)
    assert any(name.endswith((".wandb", ".db")) for name in names)
    contents = {str(path): path.read_bytes() for path in files} | texts
    return [
        (name, where)
        for name, secret in secrets.items()
        for where, content in contents.items()
        if any(form in content for form in forms(secret))
    ]


def test_no_file_and_no_word_has_a_secret(build):
    private = {
        name: f"{name.lower().replace('_', '')}5ec7e7{'0123456789' * 3}"
        for name in (
            *("ON_DONE_CMD", "ON_FAIL_CMD", "ON_STUDY_DONE_CMD"),
            *("SLURM_SETUP", "SLURM_OPTIONS"),
        )
    }
    values = {name: f"true {token}" for name, token in private.items()}
    values["SLURM_OPTIONS"] = f"--comment={private['SLURM_OPTIONS']}"
    on_top = ("--set", f"ON_FAIL_CMD='{values['ON_FAIL_CMD']}'")
    trackers = ("TRACKER_WANDB", "TRACKER_TRACKIO", "TRACKER_TENSORBOARD")
    in_file = {name: value for name, value in values.items() if name != "ON_FAIL_CMD"}
    folder = build(**SINGLE, **dict.fromkeys(trackers, True), **in_file, TELEMETRY_INTERVAL=10)
    with serving() as server:
        url = server.url.replace("//", f"//me:{PASSWORD}@")
        variables = {"ALLOW_DIRTY": "y", "V": "1", "WANDB_BASE_URL": url, **SECRETS}
        code, stdout, stderr = folder.command("all", *on_top, **variables)
        assert code == 0, stderr
        for script in ("report", "plan", "status", "ls", "verify-results"):
            folder.command(script, *on_top, **variables)
    assert "WARN" not in stderr
    # The trackers were active, and the key was used.
    assert [run.finished for run in server.runs.values()] == [True]
    secrets = {**SECRETS, "the password": PASSWORD, **private}
    texts = {"stdout": stdout.encode(), "stderr": stderr.encode()}
    assert leaks(folder.path, secrets, **texts, server=b"\n".join(server.received)) == []
    (path,) = folder.path.glob("results/*/*/resolved_config.yaml")
    record = json.loads(path.read_text())
    assert {record["symbols"][name] for name in values} == {""}
    # A change is visible.
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in values.items()}
    assert record["private_sha256"] == digests
