"""Secrets of the environment do not appear in files or output of a study."""

import base64

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


def test_no_file_and_no_word_has_a_secret(build):
    trackers = ("TRACKER_WANDB", "TRACKER_TRACKIO", "TRACKER_TENSORBOARD")
    folder = build(**dict.fromkeys(trackers, True), TELEMETRY_INTERVAL=10)
    with serving() as server:
        code, stdout, stderr = folder.command(
            "scripts/run_test_matrix.py",
            STEPS="0",
            V="1",
            ALLOW_DIRTY="y",
            WANDB_BASE_URL=server.url.replace("//", f"//me:{PASSWORD}@"),
            **SECRETS,
        )
    assert code == 0, stderr
    assert "WARN" not in stderr
    # The trackers were active, and the key was used.
    assert [run.finished for run in server.runs.values()] == [True]
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"manifest.json", "facts.json", "packages.txt", "kablate-ratio.db", "logs.txt"} <= names
    assert any(name.startswith("events.out") for name in names)
    assert any(name.endswith(".wandb") for name in names)
    contents = {str(path): path.read_bytes() for path in files}
    contents |= {"stdout": stdout.encode(), "stderr": stderr.encode()}
    contents["data sent to the server"] = b"\n".join(server.received)
    leaks = [
        (name, where)
        for name, secret in (*SECRETS.items(), ("the password", PASSWORD))
        for where, content in contents.items()
        if any(form in content for form in forms(secret))
    ]
    assert leaks == []
