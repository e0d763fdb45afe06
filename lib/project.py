"""Location of the source tree, so that scripts run from any folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
