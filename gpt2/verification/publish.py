"""Text for a methods section: the facts to publish with the results of verified runs."""

from collections.abc import Mapping, Sequence

from gpt2.verification.training import is_compiled, max_time
from lib.verify.evidence import Evidence
from lib.verify.groups import LENGTH, SOFTWARE
from lib.verify.rows import Row, spread


def said(runs: Sequence[Evidence]) -> dict[str, str]:
    """Return {group: text of its checklist row if all runs agree}."""
    first = runs[0]
    digest, tokenizer = first.of("data", "digest"), first.facts.observed["tokenizer"]
    return {
        "hardware": _hardware(first),
        "compile": "on" if is_compiled(first) is True else "off",
        "effective batch": _batch(first),
        LENGTH: _length(runs),
        "evaluation": (
            f"{first.figure('final', 'eval_documents')} documents, "
            f"{first.figure('final', 'eval_tokens')} tokens, "
            f"batches of {first.of('batch', 'micro_batch')}"
        ),
        "data and preprocessing": f"{first.of('data', 'dataset')} {digest}, tokenizer {tokenizer}",
        SOFTWARE: (
            f"torch {first.facts.observed['torch']}, "
            f"Python {first.of('environment', 'python_version')}"
        ),
    }


def to_publish(runs: Sequence[Evidence], rows: Sequence[Row]) -> Mapping[str, str]:
    """Return {name: text} in the order of a methods section."""
    texts = {row.check: row.what for row in rows}
    axis = sorted({name for each in runs for name in each.axis})
    return {
        "commit": f"{texts['git_commit']} ({texts['commit is public']})",
        "runs": ", ".join(each.name for each in runs),
        "seeds": texts["seeds"],
        "differ in": ", ".join(axis) or "no declared setting",
        "hardware": texts["hardware"],
        "training": texts[LENGTH],
        "effective batch": texts["effective batch"],
        "compile": texts["compile"],
        "data": texts["data and preprocessing"],
        "evaluation": texts["evaluation"],
        "software": texts[SOFTWARE],
    }


def _hardware(each: Evidence) -> str:
    gpu, driver = each.of("hardware", "gpu_name"), each.of("hardware", "driver_version")
    name = gpu or each.of("hardware", "cpu_model")
    suffix = f", driver {driver}" if driver else ""
    return f"{each.of('processes', 'world_size')} × {name}{suffix}"


def _batch(each: Evidence) -> str:
    whole, micro, accumulation = (
        each.of("batch", name) for name in ("global_sequences", "micro_batch", "accumulation")
    )
    processes, tokens = each.of("processes", "world_size"), each.of("batch", "tokens_per_iteration")
    return f"{whole} sequences = {micro} × {accumulation} × {processes}, {tokens} tokens"


def _length(runs: Sequence[Evidence]) -> str:
    seconds = [each.figure("timing", "train_seconds") for each in runs]
    timed = [value for value in seconds if isinstance(value, float)]
    measured = f"{min(timed):,.1f} to {max(timed):,.1f} s of training" if timed else "not timed"
    tokens = spread((each.name, each.figure("final", "tokens")) for each in runs)
    limit = max_time(runs[0])
    return f"{'' if limit is None else f'{limit} s each, '}tokens: {tokens}; {measured}"
